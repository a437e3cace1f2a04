"""How far to trust the error estimate behind SparseConfig(max_error=...): on every layer and head of SmolLM2.

    python benchmarks/calibration.py novel.txt article.txt --tokens 4096 --json benchmarks/results/calibration.json

Each head of each layer is one trial per rule: the error estimated from the sampled rows, the bound that decides, and
the true error over all rows. A trial fails a budget if the bound lies within it and the true error does not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import sparge
from sparge import SparseConfig, judging
from sparge.evaluate.models import SMOLLM2_NAME, load_smollm2
from sparge.exact import exact_rows
from sparge.inputs import prepare_inputs

RULES = {
    "default": SparseConfig(quantization="none"),
    "gap 2": SparseConfig(rule="gap", gap=2.0, quantization="none"),
    "topk .3": SparseConfig(rule="topk", topk=0.3, quantization="none"),
    "topk .1": SparseConfig(rule="topk", topk=0.1, quantization="none"),
    "cdf .9": SparseConfig(rule="cdf", cdf=0.9, subblocks=(1, 1), quantization="none"),
}
BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2)
Trial = dict[str, Any]


def trials_of(query: Tensor, key: Tensor, value: Tensor, exact: Tensor, scale: float) -> list[Trial]:
    """Every rule and head of one layer."""
    rows = judging.sampled_rows(query.shape[2], query.device)
    inputs = prepare_inputs(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    sampled = exact_rows(inputs, rows)
    found = []
    for name, config in RULES.items():
        got = sparge.attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True, config=config)
        true = (got - exact).abs().sum((-1, -2)) / exact.abs().sum((-1, -2))
        error, bound = judging.estimated_error(got[:, :, rows], sampled, query.shape[2])
        for head, numbers in enumerate(zip(true[0].tolist(), error[0].tolist(), bound[0].tolist(), strict=True)):
            found.append({"rule": name, "head": head, **dict(zip(("true", "error", "bound"), numbers, strict=True))})
    return found


@torch.inference_mode()
def measure(texts: list[Path], tokens: int) -> list[Trial]:
    model, tokenizer = load_smollm2()
    found: list[Trial] = []
    source = ""

    def check(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        exact = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        place = {"text": source, "layer": module.layer_idx}
        found.extend(place | trial for trial in trials_of(query, key, value, exact, scaling))
        return exact.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sparge_calibration", check)
    AttentionMaskInterface.register("sparge_calibration", lambda *_, **__: None)
    model.set_attn_implementation("sparge_calibration")
    for path in texts:
        source, started = path.stem, time.perf_counter()
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
        if ids.shape[1] < tokens:
            raise SystemExit(f"{path} holds {ids.shape[1]} tokens, and {tokens} are asked for.")
        model.model(ids)
        print(f"{source}: {ids.shape[1]} tokens, {time.perf_counter() - started:.0f} s", flush=True)
    return found


def failures(trials: list[Trial]) -> dict[str, dict[str, Any]]:
    """Per budget: trials that pass the check, that fail it unseen, and that would with the bare estimate."""
    table = {}
    for limit in BUDGETS:
        over = [trial for trial in trials if trial["true"] > limit]
        table[str(limit)] = {
            "trials": len(trials),
            "passed": sum(trial["bound"] <= limit for trial in trials),
            "truly within": len(trials) - len(over),
            "over, unseen": sum(trial["bound"] <= limit for trial in over),
            "over, unseen by the bare estimate": sum(trial["error"] <= limit for trial in over),
            "passed, by rule": {
                name: sum(trial["bound"] <= limit for trial in trials if trial["rule"] == name) for name in RULES
            },
        }
    return table


def draw(trials: list[Trial], path: Path) -> None:
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5.5))
    for name in RULES:
        mine = [trial for trial in trials if trial["rule"] == name]
        axes.plot([t["bound"] for t in mine], [t["true"] for t in mine], ".", markersize=3, label=name, alpha=0.6)
    axes.plot([1e-4, 2], [1e-4, 2], color="black", linewidth=1, label="true error = bound")
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 2), ylim=(1e-3, 2), title="SmolLM2, every layer and head")
    axes.set(xlabel="bound from the sampled rows", ylabel="true relative L1 over all rows")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/calibration.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/images/calibration.png"))
    chosen = parser.parse_args()
    trials = measure(chosen.texts, chosen.tokens)
    facts = {
        "model": SMOLLM2_NAME, "tokens": chosen.tokens, "texts": [path.stem for path in chosen.texts],
        "sampled rows": len(judging.sampled_rows(chosen.tokens, torch.device("cpu"))),
        "deviations": judging.DEVIATIONS, "sparge": sparge.__version__, "torch": torch.__version__,
    }  # fmt: skip
    table = failures(trials)
    chosen.json.write_text(json.dumps({"facts": facts, "budgets": table}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table, indent=1))
    draw(trials, chosen.plot)


if __name__ == "__main__":
    main()
