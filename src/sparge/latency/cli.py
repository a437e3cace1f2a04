"""`sparge bench-models`: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def bench_models(
    models: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Of flux, cogvideox, wan-1.3b, llama-24k, mochi, llama-128k, wan-14b, hunyuan. Default: all.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: the GPU.")] = None,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps each way; the median counts.")] = 3,
    quantization: Annotated[
        str | None,
        typer.Option(help="none, int8, int8-fp8 or auto, which leaves short calls dense. Default: the device's best."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Start no model after this time.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for models.json and models.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, the rest on stderr.")] = False,
) -> None:
    """Time whole models at their true size, dense by cuDNN and sparse: how much of what Amdahl allows is reached?

    Weights are random, and the paper's share of blocks is skipped by top-k: this
    says nothing of quality. Before anything is timed, attention and the whole
    model have to agree with dense when nothing is skipped; a disagreement makes
    the exit code 1. Results are written after each model; Ctrl-C keeps them.

    Examples:

      sparge bench-models --out results

      sparge bench-models --models llama-24k,cogvideox --steps 5

      sparge bench-models --models wan-14b,hunyuan --minutes 8 --out results
    """
    from sparge.bench.command import BadOptionError
    from sparge.latency.command import make_plan, run_plan

    try:
        plan = make_plan(models, device, steps, quantization, minutes)
        outcome = run_plan(plan, out, as_json)
    except (BadOptionError, OSError) as error:
        sys.exit(f"sparge bench-models: {error}")
    raise typer.Exit(outcome)
