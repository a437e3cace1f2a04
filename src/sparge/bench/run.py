"""The run: every case in turn, kept when the user stops it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import torch

from sparge.bench.cases import Case
from sparge.bench.machine import hardware, versions
from sparge.bench.measure import measure
from sparge.bench.problems import Settings
from sparge.bench.results import Results, Row


def run(
    cases: Sequence[Case],
    settings: Settings,
    before: Callable[[Case], None] = lambda case: None,
    after: Callable[[Row], None] = lambda row: None,
) -> Results:
    """Ctrl-C ends the run; what was measured until then is the result."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine, known = hardware(settings.device), versions()  # before the cases: one of them may break the device
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)  # Triton's timer and kernels use the current one
    rows: list[Row] = []
    interrupted = False
    try:
        for case in cases:
            before(case)
            rows.append(measure(case, settings))
            after(rows[-1])
    except KeyboardInterrupt:
        interrupted = True
    return Results(
        date=started,
        command=shlex.join(["sparge", *sys.argv[1:]]),
        machine=machine,
        versions=known,
        settings={
            "device": str(settings.device),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "heads": settings.heads,
            "block": list(settings.block),
            "backend": settings.backend,
            "captured": None if settings.captured is None else settings.captured.source,
        },
        rows=tuple(rows),
        interrupted=interrupted,
    )
