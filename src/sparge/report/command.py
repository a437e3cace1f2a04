"""What `sparge report` does with its options: reads, looks inside, and writes one page."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparge.bench.captured import Captured, read_captured
from sparge.bench.machine import hardware, versions
from sparge.config import SparseConfig
from sparge.evaluate import command as evaluation
from sparge.evaluate.language import evaluate
from sparge.evaluate.results import LanguageResults
from sparge.evaluate.tasks import PPL, Case
from sparge.integrations.diffusers.order import Grid
from sparge.integrations.fallback import DenseAttentionWarning
from sparge.progress import INTERRUPTED, progress_on
from sparge.report.inside import Look
from sparge.report.model import function_of_seed
from sparge.report.page import Report, Whole, check_writable, write_page
from sparge.report.pipeline import PipelineRequest, load_pipeline
from sparge.report.samples import VISION, Subject, examine
from sparge.report.sources import look_at_captured, look_at_model

CAPTURED_TOKENS = 4096
LOOK_COST = 4  # about so many prefills: the progress bar goes by it


@dataclass(frozen=True)
class CapturedRequest:
    """Captured tensors, and the settings to look at."""

    captured: Captured
    config: SparseConfig
    settings: str  # as they were given
    device: torch.device
    grid: Grid | None


@dataclass(frozen=True)
class Request:
    """What to look at, what else belongs on the page, and where it goes."""

    source: evaluation.Request | CapturedRequest | PipelineRequest
    out: Path
    vision: list[dict[str, Any]] = field(default_factory=list)


Step = Callable[..., None]  # step(what, advance, total)


def run_report(request: Request, as_json: bool) -> int:
    """Looks, writes, prints; returns the exit code."""
    console = Console(stderr=as_json)
    check_writable(request.out)  # before the work, not after
    with progress_on(console) as progress, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DenseAttentionWarning)
        task = progress.add_task("starting", total=None)

        def step(what: str, advance: int = 0, total: int | None = None) -> None:
            progress.update(task, description=what, advance=advance)
            if total is not None:
                progress.update(task, total=total)

        report = _of(request.source, step)
    vision = [*report.vision, *request.vision]
    report = replace(report, vision=vision, notes=[*report.notes, *dict.fromkeys(str(x.message) for x in said)])
    write_page(report, request.out)
    if as_json:
        print(json.dumps({"file": str(request.out), **report.plain(pictures=False)}, indent=1, allow_nan=False))
    else:
        for line in report.lines():
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    ending = "interrupted: the page holds what was done until then" if report.interrupted else "written"
    console.print(f"{request.out}: {ending}", soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED if report.interrupted else 0


def _of(source: evaluation.Request | CapturedRequest | PipelineRequest, step: Step) -> Report:
    if isinstance(source, CapturedRequest):
        return _of_captured(source, step)
    return _of_pipeline(source, step) if isinstance(source, PipelineRequest) else _of_model(source, step)


def _of_pipeline(request: PipelineRequest, step: Step) -> Report:
    step("loading the pipeline")
    pipeline = load_pipeline(request)
    run = function_of_seed(pipeline, request.arguments)
    step("sampling", total=2 * request.seeds + 1)
    subject = Subject(pipeline, run, request.variant, request.seeds)
    return examine(subject, type(pipeline).__name__, {"command": shlex.join(["sparge", *sys.argv[1:]])}, step)


def _of_model(request: evaluation.Request, step: Step) -> Report:
    """Both ways over every case first, for quality and times; then the first case once more, looked at from inside."""
    step("loading the model")
    loaded = evaluation.load(request)
    cases = request.cases(loaded.tokenizer)
    evaluation.check_length(loaded, cases)
    shown: Case = next(case for case in cases if case.task == PPL)
    per_layer = LOOK_COST * len(shown.ids) // loaded.model.config.num_hidden_layers
    total = sum(len(case.ids) for case in cases) * (1 + len(request.variants)) + LOOK_COST * len(shown.ids)
    step("reading both ways", total=total)
    variant = request.variants[0]
    results = evaluate(loaded.model, cases, request.variants, name=loaded.name, on_step=step)
    look = Look(interrupted=True)
    if not results.interrupted:
        look = look_at_model(loaded.model, shown.ids, variant, lambda name: step(name, per_layer))
    notes = results.notes + [evaluation.why_dense(name) for name in results.all_dense()]
    return Report(
        title=loaded.name,
        settings=variant.name,
        about=evaluation.about(request, loaded),
        look=look,
        results=_plain(results),
        whole=_prefill(results),
        notes=notes,
    )


def _prefill(results: LanguageResults) -> Whole | None:
    """How long one took both ways."""
    row = next((row for row in results.rows() if row.task == PPL), None) if results.cases else None
    measured = "a whole prefill was timed once each way, so a busy machine shows there"
    return None if row is None else Whole(row.dense_seconds, row.sparse_seconds, measured)


def _plain(results: LanguageResults) -> dict[str, Any]:
    """The rows, and the needles case by case."""
    return {
        "rows": [asdict(row) for row in results.rows()] if results.cases else [],
        "cases": [
            {"task": case.task, **case.facts, "scores": {way: one.score for way, one in case.readings.items()}}
            for case in results.cases
        ],
    }


def _of_captured(request: CapturedRequest, step: Step) -> Report:
    captured = request.captured
    step("looking inside", total=1 if request.grid is None else 2)
    look = look_at_captured(captured, request.config, request.device, request.grid, lambda name: step(name, 1))
    about = {
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "run": f"{request.device.type}, {captured.query.shape[1]} tokens, {'causal' if captured.causal else 'full'}",
        "machine": hardware(request.device),
        "versions": versions(),
    }
    return Report(title=captured.source, settings=request.settings, about=about, look=look)


def captured_request(
    file: Path, tokens: int | None, grid: str | None, config: SparseConfig, settings: str, device: torch.device
) -> CapturedRequest:
    """Checks what the file holds against the options."""
    captured = read_captured(file)
    length = captured.query.shape[1]
    cells = None if grid is None else _grid(grid)
    if cells is not None:
        if tokens is not None:
            raise ValueError("--grid takes all tokens of the file: leave --tokens out.")
        if cells[0] * cells[1] * cells[2] != length or captured.causal:
            raise ValueError(f"--grid {grid} needs attention that is not causal over as many tokens, not {length}.")
        return CapturedRequest(captured, config, settings, device, cells)
    wanted = min(length, CAPTURED_TOKENS) if tokens is None else tokens
    if wanted > length:
        raise ValueError(f"--tokens must lie from 1 to the file's {length}, not {wanted}.")
    parts = {name: getattr(captured, name)[:, :wanted] for name in ("query", "key", "value")}
    return CapturedRequest(replace(captured, **parts), config, settings, device, None)


def _grid(text: str) -> Grid:
    extents = [extent.strip() for extent in text.split(",")]
    if len(extents) != 3 or not all(extent.isdigit() and int(extent) > 0 for extent in extents):
        raise ValueError(f"--grid must be FRAMES,HEIGHT,WIDTH, as in 16,30,45, not {text}.")
    frames, height, width = map(int, extents)
    return frames, height, width


def read_vision(file: Path) -> list[dict[str, Any]]:
    """The rows of vision.json, as `sparge eval-vision --out` writes it, cut to what is shown."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return [{name: row[name] for name in VISION} for row in rows]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--vision {file} is not the vision.json of `sparge eval-vision --out`.") from error
