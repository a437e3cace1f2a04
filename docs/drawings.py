"""The drawings and plots of the documentation, made by the code they explain: `make drawings`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

import sparge
from sparge.inputs import prepare_inputs
from sparge.report.mass import exact_attention

matplotlib.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
TOKENS, BLOCK = 2048, (64, 32)


def draw_stages(folder: Path) -> Path:
    """True attention, what block means predict, and the blocks that are kept, of one head."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 1, TOKENS, 64).cumsum(-2) / 5
    inputs = prepare_inputs(q, k, k, is_causal=True)
    rows, keys = BLOCK
    seen = inputs.visibility.blocks(*BLOCK)[0, 0]
    mass = exact_attention(inputs, BLOCK).mass[0, 0]
    means = q.unflatten(2, (-1, rows)).mean(3) @ k.unflatten(2, (-1, keys)).mean(3).mT * inputs.scale
    predicted = means[0, 0].masked_fill(~seen, -torch.inf).softmax(-1)
    mask = sparge.predict_mask(q, k, is_causal=True, config=sparge.SparseConfig(block=BLOCK, quantization="none"))
    panels = {
        "true attention": mass / mass.sum(-1, keepdim=True),
        "predicted from block means": predicted,
        f"kept: {1 - mask.sparsity:.0%} of the visible blocks": mask.to_dense()[0, 0].float(),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(10.5, 3.7), layout="constrained")
    for panel, (title, shares) in zip(axes, panels.items(), strict=True):
        shown = shares if title.startswith("kept") else (shares.clamp(min=1e-6).log10() + 6) / 6
        image = torch.where(seen, 0.1 + 0.9 * shown, 0.0)
        panel.imshow(image.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        panel.set(title=title, xticks=[], yticks=[], xlabel="keys")
    axes[0].set_ylabel("queries")
    return _save(figure, folder / "how_stages.png")


def draw_order(folder: Path) -> Path:
    """Which tokens of a picture share a block, in raster order and along a Hilbert curve."""
    side, keys = 32, 64
    figure, axes = pyplot.subplots(1, 2, figsize=(7.5, 3.9), layout="constrained")
    for panel, name in zip(axes, ("row", "hilbert"), strict=True):
        path = sparge.token_order((1, side, side), name).permutation
        block = torch.empty(side * side)
        block[path] = (torch.arange(side * side) // keys * 7 % 16).float()  # neighbours in unlike colours
        panel.imshow(block.view(side, side).numpy(), cmap="tab20", interpolation="nearest")
        if name == "hilbert":
            panel.plot((path % side).tolist(), (path // side).tolist(), color="black", linewidth=0.5)
        panel.set(title="raster order" if name == "row" else "Hilbert order", xticks=[], yticks=[])
    return _save(figure, folder / "how_order.png")


def draw_speeds(folder: Path) -> list[Path]:
    """Speed-up against dense attention, from the result files."""
    cpu = json.loads((RESULTS / "cpu.json").read_text())["rows"]
    kinds = dict.fromkeys(_kind(row) for row in cpu)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for tokens, dim, causal in kinds:
        rows = [row for row in cpu if _kind(row) == (tokens, dim, causal)]
        label = f"{tokens} tokens, head_dim {dim}{', causal' if causal else ''}"
        axes.plot(
            [100 * row["skipped"] for row in rows], [_ratio(row) for row in rows], "o-", label=label, markersize=4
        )
    axes.set(title="CPU engine, prediction included", xlabel="blocks skipped, %", ylabel="times faster than torch SDPA")
    _finish(axes)
    axes.legend(fontsize=7)
    paths = [_save(figure, folder / "speed_cpu.png")]

    measured = json.loads((RESULTS / "gpu_h200_bars.json").read_text())["rows"]
    bars = {_label(row["case"], row["skipped"]): _ratio(row) for row in measured if row["outcome"] == "measured"}
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    axes.barh(list(bars)[::-1], list(bars.values())[::-1], color="#1f5fbf", height=0.65)
    axes.tick_params(axis="y", labelsize=7)
    axes.set(title="One H200, prediction included", xlabel="times faster than cuDNN's bf16 attention")
    _finish(axes)
    return [*paths, _save(figure, folder / "speed_h200.png")]


def draw_rules(folder: Path) -> Path:
    """What SmolLM2 loses against what it skips, rule by rule."""
    results = json.loads((RESULTS / "gpu_h200_rules_8k.json").read_text())
    names = {
        "topk": "top-k of block means",
        "cdf": "TopCdf of block means (the paper)",
        "threshold+gap": "threshold or gap on 4 x 4 means",
        "gap+probe": "gap, or share from means and rows (the default)",
    }
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    for rule, name in names.items():
        rows = [
            (100 * row["skipped"], 100 * row["change"])
            for row in results["rows"]
            if row["on"] == "all 3" and "+".join(results["variants"][row["variant"]]["config"]["rule"]) == rule
        ]
        axes.plot(*zip(*sorted(rows), strict=True), "o-", label=name, markersize=4)
    axes.set(
        title="SmolLM2-135M, 8,192 tokens, nine windows, nothing tuned",
        xlabel="blocks skipped, %", ylabel="perplexity, % above dense (logarithmic)", yscale="log",
    )  # fmt: skip
    _finish(axes)
    axes.legend(fontsize=8)
    return _save(figure, folder / "rules.png")


def draw_all(folder: Path) -> list[Path]:
    return [draw_stages(folder), draw_order(folder), *draw_speeds(folder), draw_rules(folder)]


def _label(case: dict[str, Any], skipped: float) -> str:
    more = [word for word, said in (("causal", case["causal"]), ("skewed", case["mask"] == "skewed")) if said]
    more += [f"groups of {case['group']}"] if case["group"] > 1 else []
    words = [
        f"{case['tokens'] // 1024}K",
        f"D{case['head_dim']}",
        f"{skipped:.0%} skipped",
        case["quantization"],
        *more,
    ]
    return ", ".join(words)


def _kind(row: dict[str, Any]) -> tuple[int, int, bool]:
    return row["case"]["tokens"], row["case"]["head_dim"], row["case"]["causal"]


def _ratio(row: dict[str, Any]) -> float:
    return float(next(timing["ratio"] for timing in row["timings"] if timing["name"] == "total"))


def _finish(axes: Any) -> None:
    axes.grid(True, alpha=0.25)
    axes.set_axisbelow(True)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    for made in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "images"):
        print(made)
