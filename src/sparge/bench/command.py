"""What `sparge bench` does with its options: checks them, runs the cases under a progress bar, writes the results."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from sparge.backends import BACKENDS
from sparge.bench import report
from sparge.bench.captured import read_captured
from sparge.bench.cases import GRIDS, Case, cases_of
from sparge.bench.contenders import CONTENDERS
from sparge.bench.problems import Settings
from sparge.bench.results import Results, Row
from sparge.bench.run import run
from sparge.config import SparseConfig
from sparge.progress import INTERRUPTED, progress_on

GPU_HEADS, CPU_HEADS = 32, 4


class BadOptionError(Exception):
    """An option that cannot be followed; the message is one sentence."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how."""

    cases: tuple[Case, ...]
    settings: Settings


def make_plan(
    grid: str | None,
    device: str | None,
    heads: int | None,
    block: str | None,
    backend: str | None,
    captured: Path | None,
    without: tuple[str, ...],
) -> Plan:
    place = device_named(device)
    on_gpu = place.type == "cuda"
    grid = grid or ("bars" if on_gpu else "cpu")
    if grid not in GRIDS:
        raise BadOptionError(f"--grid must be one of {', '.join(GRIDS)}, not {grid}.")
    _check_backend(backend)
    rivals = [contender.name for contender in CONTENDERS]
    for name in without:
        if name not in rivals:
            raise BadOptionError(f"--without must be one of {', '.join(rivals)}, not {name}.")
    try:
        tensors = None if captured is None else read_captured(captured)
    except ValueError as error:
        raise BadOptionError(f"--captured: {error}") from error
    heads = heads or (GPU_HEADS if on_gpu else CPU_HEADS)
    settings = Settings(place, heads, _block(block), backend, tensors, without)
    return Plan(cases_of(grid, captured is not None), settings)


def run_plan(plan: Plan, out: Path | None, as_json: bool) -> int:
    """Measures, prints, writes; returns the exit code."""
    if out is not None:
        check_writable(out)  # before the work, not after
    console = Console(stderr=as_json)
    with progress_on(console) as progress:
        task = progress.add_task("starting", total=len(plan.cases))

        def before(case: Case) -> None:
            progress.update(task, description=case.label)

        def after(row: Row) -> None:
            progress.advance(task)
            if not as_json:
                console.print(report.line(row), soft_wrap=True, highlight=False, markup=False)

        results = run(plan.cases, plan.settings, before, after)
    if as_json:
        print(results.to_json())
    _close(results, out, console, as_json)
    return INTERRUPTED if results.interrupted else 1 if results.any_wrong else 0


def _close(results: Results, out: Path | None, console: Console, as_json: bool) -> None:
    """Writes the files, and says what is missing and why."""
    if not as_json:
        for reason, count in sorted(results.missing().items()):
            console.print(f"no time for {reason} ({count}x)", soft_wrap=True, highlight=False, markup=False)
    if results.interrupted:
        console.print(f"Interrupted after {len(results.rows)} cases.", highlight=False)
    if out is None:
        return
    paths = report.write_results(results, out)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plots: they need matplotlib (pip install matplotlib).", highlight=False)
    else:
        from sparge.bench.plots import draw_all

        paths += draw_all(results, out)
    console.print(f"Written: {', '.join(map(str, paths))}", soft_wrap=True, highlight=False, markup=False)


def device_named(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadOptionError(f"--device must be cpu, cuda or cuda:N, not {name}.") from error
    if device.type not in ("cpu", "cuda"):
        raise BadOptionError(f"--device must be cpu, cuda or cuda:N, not {name}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadOptionError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _check_backend(name: str | None) -> None:
    if name is None:
        return
    takers = {backend.name: backend for backend in BACKENDS if backend.takes_masks}
    if name not in takers:
        raise BadOptionError(f"--backend must be one of {', '.join(takers)}, not {name}.")
    refusal = takers[name].unavailable()
    if refusal is not None:
        raise BadOptionError(f"--backend {name} cannot run here: {refusal}.")


def _block(text: str | None) -> tuple[int, int]:
    if text is None:
        return SparseConfig().block
    try:
        rows, keys = (int(part) for part in text.split(","))
        return SparseConfig(block=(rows, keys)).block
    except ValueError as error:
        hint = str(error) if "block" in str(error) else "block must be ROWS,KEYS, as in 128,64."
        raise BadOptionError(f"--block {text}: {hint}") from error


def check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadOptionError(f"--out {folder} cannot be written: {error.strerror}.") from error
