"""Dense against sparse samples of a trained model, tuned for a row of error bounds, in Hilbert and in row order.

    python -m examples.train.evaluate runs/video/video.safetensors --data examples/train/data/video.safetensors \\
        --out results

Prints a table, and writes it as Markdown and JSON with the profile that was chosen: the most sparsity in Hilbert order
with a PSNR of --target or more. It is then judged on seeds that had no part in the choice; they are what the verdict,
the contact sheet and the GIF are of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import sparge
from examples.train.errors import said_plainly
from examples.train.layers import sparse_layers, tuned
from examples.train.sample import Sampler
from sparge.bench.machine import hardware, versions
from sparge.evaluate.frames import contact_sheet, side_by_side
from sparge.evaluate.language import Variant
from sparge.evaluate.vision import Pair, compare_losses, compare_samples
from sparge.evaluate.vision_command import VisionResult
from sparge.progress import progress_on

ORDERS = ("hilbert", "row")
BOUNDS = (0.03, 0.07, 0.12, 0.2, 0.3, 0.45)
DENSE_SHARE = 0.2  # of the first sampling steps, in the ways that keep some dense
FRAMES_PER_SECOND = 10
NOTHING_SKIPPED = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none")
DECIBELS, SPARSITY = 30.0, 0.45  # what is aimed at
COLUMNS = (
    "order", "settings", "dense steps", "skipped", "PSNR", "worst", "SSIM", "loss dense", "loss change", "speed-up"
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Way:
    """One kind of sparse sample."""

    order: str
    settings: str
    dense_steps: int
    config_for: Callable[[str], sparge.SparseConfig]
    profile: sparge.Profile | None = None

    @property
    def name(self) -> str:
        return f"{self.order}, {self.settings}, {self.dense_steps} dense steps"

    def block(self, sampler: Sampler) -> AbstractContextManager[None]:
        return sparse_layers(sampler, self.config_for, self.dense_steps)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A way, and how its samples and losses compare."""

    way: Way
    pairs: list[Pair]
    facts: dict[str, Any]

    @property
    def reached(self) -> float:
        """PSNR over all seeds; samples that are equal have more than any."""
        return float("inf") if self.facts["psnr"] is None else float(self.facts["psnr"])


def ways_of(
    sampler: Sampler, bounds: Sequence[float], base: sparge.SparseConfig, on_step: Callable[[str, str], None]
) -> list[Way]:
    """Nothing skipped, which shows what rounding alone does; then untuned settings and those tuned for each bound, with
    and without dense first steps.
    """
    order = sampler.model.order
    few = max(1, round(DENSE_SHARE * sampler.sampling["steps"]))
    ways = [Way(order, "nothing skipped", 0, lambda _: NOTHING_SKIPPED)]
    ways += [Way(order, "untuned", dense_steps, lambda _: base) for dense_steps in (0, few)]
    for bound, profile in tuned(sampler, bounds, base, on_step=on_step).items():
        ways += [
            Way(order, f"l1 {bound:g}", dense_steps, profile.config_for, profile) for dense_steps in (0, few)
        ]  # fmt: skip
    return ways


def outcomes(sampler: Sampler, ways: Sequence[Way], seeds: range, done: Callable[[], None]) -> list[Outcome]:
    """Samples of these seeds, and as many losses four times over, of each way."""
    blocks = {way.name: partial(way.block, sampler) for way in ways}
    pairs = compare_samples(sampler, seeds, blocks, lambda *_: done())
    gaps = compare_losses(sampler.loss, range(4 * seeds.start, 4 * seeds.stop), blocks)
    found = []
    for way in ways:
        result = VisionResult(Variant(way.name), pairs[way.name], gaps[way.name])
        found.append(Outcome(way, pairs[way.name], result.summary()))
    return found


def best(found: Sequence[Outcome], target: float) -> Outcome:
    """The most sparsity in Hilbert order at the PSNR that is asked for; where none has it, the best PSNR."""
    candidates = [outcome for outcome in found if outcome.way.order == ORDERS[0] and outcome.way.profile is not None]
    good = [outcome for outcome in candidates if outcome.reached >= target]
    if good:
        return max(good, key=lambda outcome: outcome.facts["skipped"])
    return max(candidates, key=lambda outcome: outcome.reached)


def quantised(way: Way) -> Way:
    """The same blocks, in the fastest number format of the GPU."""
    form = "int8-fp8" if torch.cuda.get_device_capability() >= (8, 9) else "int8"
    return replace(
        way,
        settings=f"{way.settings}, {form}",
        config_for=lambda layer: replace(way.config_for(layer), quantization=form),
    )


def cells(outcome: Outcome) -> list[str]:
    facts, way = outcome.facts, outcome.way

    def decibels(value: float | None) -> str:
        return "equal" if value is None else f"{value:.2f} dB"

    return [
        way.order, way.settings, str(way.dense_steps), f"{facts['skipped']:.1%}", decibels(facts["psnr"]),
        decibels(facts["worst_psnr"]), f"{facts['ssim']:.4f}", f"{facts['dense_loss']:.5f}",
        f"{facts['loss_change']:+.2g}", f"{facts['speedup']:.2f}x",
    ]  # fmt: skip


def table(found: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(outcome))} |" for outcome in found)])


def order_table(found: Sequence[Outcome]) -> str:
    """Hilbert against row order: blocks skipped on the inputs of the search, at equal bounds on the error."""
    by_bound: dict[str, dict[str, float]] = {}
    for outcome in found:
        way = outcome.way
        if way.profile is not None and way.dense_steps == 0:
            by_bound.setdefault(way.settings, {})[way.order] = 1 - way.profile.metrics["executed"]
    lines = [f"| bound | {' | '.join(ORDERS)} |", "|" + "---|" * (1 + len(ORDERS))]
    for bound, shares in by_bound.items():
        if len(shares) == len(ORDERS):
            lines.append(f"| {bound} | {' | '.join(f'{shares[order]:.1%}' for order in ORDERS)} |")
    return "\n".join(lines)


def verdict(judged: Outcome, target: float, sparsity: float) -> str:
    facts = judged.facts
    met = judged.reached >= target and facts["skipped"] >= sparsity
    return (
        f"{'Reached' if met else 'Not reached'}: {target:g} dB at {sparsity:.0%} skipped. Chosen: {judged.way.name}; "
        f"on {facts['seeds']} new seeds {cells(judged)[4]} at {facts['skipped']:.1%} skipped."
    )


@dataclass(frozen=True)
class Evaluation:
    """All ways on the first seeds, and the one that was chosen, plain and on a GPU quantised, on new ones."""

    found: list[Outcome]
    judged: list[Outcome]

    def text(self, target: float, sparsity: float) -> str:
        parts = [
            verdict(self.judged[0], target, sparsity), "The choice, on new seeds:", table(self.judged),
            "What it was chosen from:", table(self.found),
            "Blocks skipped at equal error, by the order of the tokens:", order_table(self.found),
        ]  # fmt: skip
        return "\n\n".join(parts)


def evaluate(sampler: Sampler, bounds: Sequence[float], seeds: int, target: float, console: Console) -> Evaluation:
    base = sparge.SparseConfig(quantization="none")
    found: list[Outcome] = []
    with progress_on(console) as bar:
        for order in ORDERS:
            sampler.model.order = order
            tuning = bar.add_task(f"tuning, {order} order", total=None)
            ways = ways_of(sampler, bounds, base, lambda *_, task=tuning: bar.advance(task))
            sampling = bar.add_task(f"sampling, {order} order", total=seeds * len(ways))
            found += outcomes(sampler, ways, range(seeds), lambda task=sampling: bar.advance(task))
            console.print(f"{order} order: tuned, {len(ways)} settings sampled", highlight=False)
        chosen = best(found, target).way
        sampler.model.order = chosen.order
        ways = [chosen, quantised(chosen)] if sampler.device.type == "cuda" else [chosen]
        return Evaluation(found, outcomes(sampler, ways, range(seeds, 2 * seeds), lambda: None))


def write(sampler: Sampler, evaluation: Evaluation, text: str, out: Path) -> None:
    """The files that the module's docstring names."""
    chosen, name = evaluation.judged[0], sampler.name
    profile = chosen.way.profile
    assert profile is not None
    about = {
        "weights": sampler.facts, "machine": hardware(sampler.device), "versions": versions(),
        "chosen": chosen.way.name, "judged": _rows(evaluation.judged), "found": _rows(evaluation.found),
        "chosen_by_layer_and_head": {
            layer: {"executed": one.executed, "error": one.error} for layer, one in profile.layers.items()
        },
    }  # fmt: skip
    (out / f"{name}-results.json").write_text(json.dumps(about, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / f"{name}-results.md").write_text(text + "\n", encoding="utf-8")
    profile.save(out / f"{name}-profile.safetensors")
    contact_sheet(chosen.pairs, out / f"{name}-contact-sheet.png")
    if sampler.model.config.frames > 1:
        side_by_side(chosen.pairs[0], out / f"{name}-side-by-side.gif", FRAMES_PER_SECOND)


def _rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {"order": one.way.order, "dense_steps": one.way.dense_steps, **one.facts, "settings": one.way.settings}
        for one in outcomes
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6, help="to choose with, and as many new ones to judge the choice")
    parser.add_argument("--l1", type=float, nargs="+", default=BOUNDS, help="bounds on the error of the heads")
    parser.add_argument("--target", type=float, default=DECIBELS, help="PSNR in dB")
    parser.add_argument("--sparsity", type=float, default=SPARSITY, help="share of blocks that should be skipped")
    parser.add_argument("--device")
    return parser.parse_args()


def main() -> None:
    options, console = parsed(), Console()
    sampler = Sampler(options.weights, options.data, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    evaluation = evaluate(sampler, options.l1, options.seeds, options.target, console)
    text = evaluation.text(options.target, options.sparsity)
    print(text)
    write(sampler, evaluation, text, options.out)


if __name__ == "__main__":
    with said_plainly():
        main()
