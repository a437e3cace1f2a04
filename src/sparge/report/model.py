"""report_model: the page of any model that sparge reaches, above all of those that make images and video."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparge.config import SparseConfig
from sparge.evaluate.language import Variant
from sparge.integrations.diffusers.models import is_pipeline, original
from sparge.integrations.diffusers.order import Grid
from sparge.integrations.layers import DenseLayers
from sparge.profile import Profile
from sparge.report.page import Report, check_writable, write_page
from sparge.report.samples import Run, Subject, examine

DEFAULT = SparseConfig()


def report_model(
    model: Any,
    run: Run | Mapping[str, Any],
    out: str | Path = "sparge-report.html",
    config: SparseConfig | None = None,
    profile: Profile | None = None,
    *,
    seeds: int = 2,
    forward: int | None = None,
    grid: Grid | None = None,
    dense_layers: DenseLayers = 0,
    dense_steps: int = 0,
    title: str | None = None,
) -> Report:
    """Run a model dense and sparse from the same seeds, look inside, and write what is found as one HTML page.

    model         a model or pipeline that `sparge.patch` takes; of any other module every call of torch's attention is
                  made sparse, as by `sparge.patched`
    run           the arguments of the model or pipeline, by name; or a function of a seed that runs it and gives an
                  image or frames as `compare_samples` takes them, or None where there is nothing to compare. The seed
                  must decide all that is random. A pipeline's arguments are completed by a generator of each seed
    out           the page
    config        settings of every layer; the default needs no tuning
    profile       tuned settings by layer name
    seeds         so many samples are compared, from seed 0 on; the first is looked at
    forward       which forward of that sample to look inside, from 1; default: the middle one of those that are sparse
    grid          frames, height and width, where a module of one's own puts its tokens in Hilbert order itself
    dense_layers  and dense_steps: as in `sparge.patch`

    The model must not be patched. Ctrl-C writes what was done until then. Returns what the page shows.
    """
    page = Path(out)
    pictures = is_pipeline(model) or not isinstance(run, Mapping)
    for package in ("jinja2", "skimage", "PIL") if pictures else ("jinja2",):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"report_model needs {package}: pip install 'sparge[report,eval]'.")
    check_writable(page)
    subject = Subject(
        model=model,
        run=function_of_seed(model, run),
        variant=Variant(_settings(config, profile), config, profile),
        seeds=seeds,
        forward=forward,
        grid=grid,
        dense_layers=dense_layers,
        dense_steps=dense_steps,
    )
    report = examine(subject, title or type(original(model)).__name__)
    write_page(report, page)
    return report


def function_of_seed(model: Any, run: Run | Mapping[str, Any]) -> Run:
    """Arguments of a pipeline as a function that gives its pictures; those of a model as one that gives None."""
    if not isinstance(run, Mapping):
        if not callable(run):
            raise TypeError(f"run must be arguments by name or a function of a seed, not {type(run).__name__}.")
        return run
    inputs = dict(run)
    if not is_pipeline(model):
        return partial(_forward, model, inputs)
    if "generator" in inputs or "output_type" in inputs:
        raise ValueError("generator and output_type are set by the report: leave them out of the pipeline's arguments.")

    def pictures(seed: int) -> Any:
        made = model(**inputs, generator=torch.Generator().manual_seed(seed), output_type="np")
        return made.frames[0] if hasattr(made, "frames") else made.images[0]

    return pictures


def _forward(model: Any, inputs: Mapping[str, Any], seed: int) -> None:
    model(**inputs)


def _settings(config: SparseConfig | None, profile: Profile | None) -> str:
    """What differs from the default, as the command line has it."""
    named = [] if profile is None else [f"profile of {profile.model}"]
    for one in () if config is None else fields(config):
        value = getattr(config, one.name)
        if value != getattr(DEFAULT, one.name):
            named.append(f"{one.name}={_shown(one.name, value)}")
    return ", ".join(named) or "default"


def _shown(name: str, value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    separator = {"rule": "+", "block": "x", "subblocks": "x"}.get(name)
    return f"({len(value)} values)" if separator is None else separator.join(map(str, value))
