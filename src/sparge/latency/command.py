"""What `sparge bench-models` does with its options: checks them, measures model by model, writes after each."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from sparge.bench.command import BadOptionError, check_writable, device_named
from sparge.bench.machine import hardware, version_of, versions
from sparge.bench.results import NOT_RUN
from sparge.config import QUANTIZATIONS
from sparge.latency import report
from sparge.latency.catalogue import MODELS, Model
from sparge.latency.measure import Settings, measure, own_format
from sparge.latency.results import Results, Row
from sparge.progress import INTERRUPTED, progress_on


@dataclass(frozen=True)
class Plan:
    """What to measure, how, and for how long at most."""

    models: tuple[Model, ...]
    settings: Settings
    minutes: float | None


def make_plan(
    models: str | None, device: str | None, steps: int, quantization: str | None, minutes: float | None
) -> Plan:
    if device is None and not torch.cuda.is_available():
        raise BadOptionError("models of true size need a GPU: --device cpu runs them all the same, for hours.")
    place = device_named(device)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise BadOptionError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, not {quantization}.")
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return Plan(_chosen(models), Settings(place, dtype, steps, quantization or own_format(place)), minutes)


def _chosen(names: str | None) -> tuple[Model, ...]:
    known = {model.name: model for model in MODELS}
    if names is None:
        return MODELS
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise BadOptionError(f"--models must be of {', '.join(known)}, not {name}.")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def run_plan(plan: Plan, out: Path | None, as_json: bool) -> int:
    """Measures, prints, writes; returns the exit code."""
    if out is not None:
        check_writable(out)  # before the work, not after
    console = Console(stderr=as_json)
    with progress_on(console) as progress:
        task = progress.add_task("starting", total=len(plan.models))

        def on_stage(model: Model, stage: str) -> None:
            progress.update(task, description=f"{model.title}: {stage}")

        def after(results: Results) -> None:
            progress.advance(task)
            console.print(report.line(results.rows[-1]), soft_wrap=True, highlight=False, markup=False)
            if out is not None:
                report.write_results(results, out)

        results = _run(plan, on_stage, after)
    if as_json:
        print(results.to_json())
    if results.interrupted:
        console.print(f"Interrupted after {len(results.rows)} models.", highlight=False)
    if out is not None:
        paths = report.write_results(results, out)
        console.print(f"Written: {', '.join(map(str, paths))}", soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED if results.interrupted else 1 if results.any_wrong else 0


def _run(plan: Plan, on_stage: Callable[[Model, str], None], after: Callable[[Results], None]) -> Results:
    """Ctrl-C ends the run; what was measured until then is the result."""
    results = _nothing_yet(plan.settings)
    if plan.settings.device.type == "cuda":
        torch.cuda.set_device(plan.settings.device)  # kernels use the current one
    begun = time.monotonic()
    try:
        for model in plan.models:
            if plan.minutes is not None and time.monotonic() - begun > 60 * plan.minutes:
                row = Row.of(model, NOT_RUN, f"the {plan.minutes:g} minutes of --minutes were over before it.")
            else:
                row = measure(model, plan.settings, partial(on_stage, model))
            results = replace(results, rows=(*results.rows, row))
            after(results)
    except KeyboardInterrupt:
        results = replace(results, interrupted=True)
    return results


def _nothing_yet(settings: Settings) -> Results:
    libraries = {name: version_of(name) for name in ("transformers", "diffusers")}
    return Results(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["sparge", *sys.argv[1:]]),
        machine=hardware(settings.device),
        versions={**versions(), **libraries},
        settings={
            "device": str(settings.device),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "steps": settings.steps,
            "quantization": settings.quantization,
        },
        rows=(),
    )
