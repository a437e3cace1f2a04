"""Models of diffusers, alone, inside other modules, or as the components of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

DENOISERS = ("transformer", "transformer_2", "unet")  # where pipelines keep what runs at each step


def is_pipeline(model: object) -> bool:
    home = sys.modules.get("diffusers.pipelines.pipeline_utils")  # a pipeline cannot be there without it
    return home is not None and isinstance(model, home.DiffusionPipeline)


def diffusers_models(model: Any) -> dict[str, Any]:
    """The models of diffusers in a pipeline or a module, by the prefix of their layers' names."""
    found = dict(_components(model) if is_pipeline(model) else _parts(model))
    return {"": next(iter(found.values()))} if is_pipeline(model) and len(found) == 1 else found


def _components(pipeline: Any) -> Iterator[tuple[str, Any]]:
    for name in DENOISERS:
        part = original(getattr(pipeline, name, None))
        if _is_model(part):
            yield f"{name}.", part


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """A model itself, or the outermost ones inside it."""
    outer: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not _is_model(module) or any(map(name.startswith, outer)):
            continue
        outer += (f"{name}." if name else "",)
        yield outer[-1], module


def _is_model(part: object) -> bool:
    home = sys.modules.get("diffusers.models.modeling_utils")
    return home is not None and isinstance(part, home.ModelMixin)


def original(model: Any) -> Any:
    """The model inside what torch.compile returns."""
    return getattr(model, "_orig_mod", model) if isinstance(model, torch.nn.Module) else model
