"""What `sparge eval-vision` does with its options."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sparge.bench.machine import hardware, versions
from sparge.evaluate.frames import check_video, contact_sheet, side_by_side
from sparge.evaluate.language import Variant
from sparge.evaluate.statistics import mean_interval
from sparge.evaluate.vision import LossGap, Pair, SampleError, compare_losses, compare_samples, psnr
from sparge.integrations.patch import patch
from sparge.integrations.torch_sdpa import patched
from sparge.progress import INTERRUPTED, progress_on

COLUMNS = (
    "settings", "seeds", "PSNR", "worst", "SSIM", "95 % interval", "loss dense", "loss sparse", "change",
    "95 % interval of it", "skipped", "dense s", "sparse s", "speed-up",
)  # fmt: skip
NONE = "–"


@dataclass(frozen=True)
class VisionRequest:
    """What to sample, and under which settings."""

    sample: str  # FILE.py:FUNCTION
    seeds: int
    model: str | None
    loss: str | None
    variants: tuple[Variant, ...]
    video: str
    fps: int

    def __post_init__(self) -> None:
        check_video(self.video)
        if self.model is None and any(variant.profile is not None for variant in self.variants):
            raise ValueError("a profile names the layers of a model: say which with --model.")


@dataclass
class VisionResult:
    """The pairs of one variant, and its loss."""

    variant: Variant
    pairs: list[Pair] = field(default_factory=list)
    gap: LossGap | None = None

    def summary(self) -> dict[str, Any]:
        """As plain values; a PSNR of None means no difference at all."""
        visible = sum(pair.visible for pair in self.pairs)
        likeness = [pair.ssim for pair in self.pairs]
        gap = self.gap
        dense, sparse = (median(getattr(pair, f"{way}_seconds") for pair in self.pairs) for way in ("dense", "sparse"))
        return {
            "settings": self.variant.name,
            "seeds": len(self.pairs),
            "psnr": psnr(sum(pair.squared_error for pair in self.pairs) / len(self.pairs)),
            "worst_psnr": psnr(max(pair.squared_error for pair in self.pairs)),
            "ssim": sum(likeness) / len(likeness),
            "ssim_interval": mean_interval(likeness),
            "dense_loss": None if gap is None else sum(gap.dense) / len(gap.dense),
            "sparse_loss": None if gap is None else sum(gap.sparse) / len(gap.sparse),
            "loss_change": None if gap is None else gap.change,
            "loss_interval": None if gap is None else gap.interval,
            "skipped": (visible - sum(pair.executed for pair in self.pairs)) / max(1, visible),
            "dense_seconds": dense,
            "sparse_seconds": sparse,
            "speedup": dense / sparse,
            "by_seed": [
                {"seed": pair.seed, "psnr": pair.psnr, "ssim": pair.ssim, "dense_seconds": pair.dense_seconds,
                 "sparse_seconds": pair.sparse_seconds, "executed": pair.executed, "visible": pair.visible}
                for pair in self.pairs
            ],
        }  # fmt: skip


def run_eval_vision(request: VisionRequest, out: Path | None, as_json: bool) -> int:
    """Samples, prints, writes into `out`, which must be there; returns the exit code."""
    console = Console(stderr=as_json)
    names = _run_file(request)
    with progress_on(console) as progress:
        task = progress.add_task("sampling", total=request.seeds * len(request.variants))
        results, interrupted = _measure(request, names, lambda: progress.advance(task))
    about = {
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "machine": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "interrupted": interrupted,
    }
    _show(results, about, console, as_json)
    if interrupted:
        console.print(f"Interrupted after {sum(len(result.pairs) for result in results)} samples.", highlight=False)
    if out is not None and results:
        paths = [*_write_tables(results, about, out), *_write_pictures(results, request, out)]
        console.print(f"Written: {', '.join(map(str, paths))}", soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED if interrupted else 0


def _run_file(request: VisionRequest) -> dict[str, Any]:
    """The names that the caller's file defines, checked for those that are needed."""
    place, _, function = request.sample.rpartition(":")
    if not place or not Path(place).is_file():
        raise SampleError(f"expected FILE.py:FUNCTION with a file that is there, not {request.sample}.")
    names = runpy.run_path(place)
    for name in (function, request.loss):
        if name is not None and not callable(names.get(name)):
            raise SampleError(f"{place} defines no function {name}.")
    if request.model is not None:
        if request.model not in names:
            raise SampleError(f"{place} defines no model {request.model}.")
        try:
            for variant in request.variants:
                patch(names[request.model], variant.config, variant.profile, dry_run=True)
        except (TypeError, ValueError) as error:
            raise SampleError(str(error)) from error
    return names


def _measure(
    request: VisionRequest, names: dict[str, Any], done: Callable[[], None]
) -> tuple[list[VisionResult], bool]:
    """The variants that have a pair, and whether Ctrl-C ended it early."""
    results = {variant.name: VisionResult(variant) for variant in request.variants}
    model = None if request.model is None else names[request.model]
    ways = {variant.name: partial(_sparse, variant, model) for variant in request.variants}

    def keep(way: str, pair: Pair) -> None:
        results[way].pairs.append(pair)
        done()

    interrupted = False
    try:
        compare_samples(names[request.sample.rpartition(":")[2]], range(request.seeds), ways, keep)
        if request.loss is not None:
            for way, gap in compare_losses(names[request.loss], range(request.seeds), ways).items():
                results[way].gap = gap
    except KeyboardInterrupt:
        interrupted = True
    return [result for result in results.values() if result.pairs], interrupted


def _sparse(variant: Variant, model: Any) -> AbstractContextManager[Any]:
    return patched(variant.config) if model is None else patch(model, variant.config, variant.profile)


def _show(results: list[VisionResult], about: dict[str, Any], console: Console, as_json: bool) -> None:
    if as_json:
        print(_json(results, about))
        return
    table = Table("", *(result.variant.name for result in results))  # a column for each: it must fit 80 characters
    for cells in list(zip(COLUMNS, *map(_cells, results), strict=True))[1:]:
        if set(cells[1:]) != {NONE}:
            table.add_row(*cells)
    console.print(table)
    for result in results:
        if not any(pair.visible for pair in result.pairs):
            none = "no attention call was sparse: all were too short to gain, or none reached sparge (see --model)."
            console.print(f"{result.variant.name}: {none}", highlight=False, markup=False)


def _json(results: list[VisionResult], about: dict[str, Any]) -> str:
    described = {result.variant.name: result.variant.described for result in results}
    rows = [result.summary() for result in results]
    return json.dumps({**about, "variants": described, "rows": rows}, indent=1, allow_nan=False)


def _cells(result: VisionResult) -> list[str]:
    facts = result.summary()

    def decibels(value: float | None) -> str:
        return "equal" if value is None else f"{value:.2f} dB"

    def number(name: str, form: str) -> str:
        return NONE if facts[name] is None else format(facts[name], form)

    def between(name: str, form: str) -> str:
        return NONE if facts[name] is None else " to ".join(format(bound, form) for bound in facts[name])

    return [
        facts["settings"], str(facts["seeds"]), decibels(facts["psnr"]), decibels(facts["worst_psnr"]),
        f"{facts['ssim']:.4f}", between("ssim_interval", ".4f"), number("dense_loss", ".5f"),
        number("sparse_loss", ".5f"), number("loss_change", "+.2g"), between("loss_interval", "+.2g"),
        f"{facts['skipped']:.1%}", f"{facts['dense_seconds']:.2f}", f"{facts['sparse_seconds']:.2f}",
        f"{facts['speedup']:.2f}x",
    ]  # fmt: skip


def _write_tables(results: list[VisionResult], about: dict[str, Any], folder: Path) -> list[Path]:
    paths = [folder / "vision.json", folder / "vision.md"]
    paths[0].write_text(_json(results, about) + "\n", encoding="utf-8")
    lines = [f"`{about['command']}`", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    paths[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def _write_pictures(results: list[VisionResult], request: VisionRequest, folder: Path) -> list[Path]:
    paths = []
    for number, result in enumerate(results):
        ending = f"-{number}" if len(results) > 1 else ""
        paths.append(folder / f"contact-sheet{ending}.png")
        contact_sheet(result.pairs, paths[-1])
        first = result.pairs[0]
        if len(first.dense) > 1:
            paths.append(folder / f"side-by-side{ending}.{request.video}")
            side_by_side(first, paths[-1], request.fps)
    return paths
