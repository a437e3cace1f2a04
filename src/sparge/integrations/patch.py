"""sparge.patch: sparse attention for a model that one already has, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch

from sparge.config import SparseConfig
from sparge.integrations.diffusers import hooks
from sparge.integrations.diffusers.layers import attention_layers as diffusers_layers
from sparge.integrations.diffusers.models import diffusers_models, is_pipeline, original
from sparge.integrations.diffusers.steps import Steps
from sparge.integrations.fallback import DenseAttentionWarning
from sparge.integrations.layers import ALONE, SPARSE, DenseLayers, Layer, check_profile, keep_dense
from sparge.integrations.transformers.attention import NAME, SETTINGS
from sparge.integrations.transformers.interface import ImplementationSwitch, reads_implementation, whole_models
from sparge.integrations.transformers.layers import attention_layers
from sparge.integrations.transformers.registration import register
from sparge.profile import Profile

RECORD = "sparge_patch"  # the attribute of a patched model: what takes the patch away; None: nothing was changed


@dataclass(frozen=True)
class Plan:
    """What a patch does to each attention layer; str() is a table."""

    model: str
    layers: tuple[Layer, ...]

    @property
    def sparse(self) -> int:
        """How many layers become sparse."""
        return sum(layer.action == SPARSE for layer in self.layers)

    def __str__(self) -> str:
        head = f"{self.model}: {self.sparse} of {len(self.layers)} attention layers sparse"
        rows = [("layer", "class", "heads", "head_dim", "action", "why")]
        for layer in self.layers:
            rows.append((layer.name, layer.kind, _shown(layer.heads), _shown(layer.head_dim), layer.action, layer.why))
        return "\n".join([head, *_columns(rows)])


class Patch:
    """A patched model; as a context manager it is unpatched at the end of the block."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan = model, plan

    def __enter__(self) -> Patch:
        parts = _parts(self.model)
        if parts and not any(RECORD in vars(part) for part in parts):
            raise ValueError(f"this patch of {type(self.model).__name__} was taken away; call sparge.patch again.")
        return self

    def __exit__(self, *_: object) -> None:
        if any(RECORD in vars(part) for part in _parts(self.model)):
            unpatch(self.model)

    def __str__(self) -> str:
        return str(self.plan)


@overload
def patch(
    model: Any,
    config: SparseConfig | None = None,
    profile: Profile | None = None,
    dry_run: Literal[False] = False,
    *,
    dense_layers: DenseLayers = 0,
    dense_steps: int = 0,
    mask_steps: int = 1,
) -> Patch: ...


@overload
def patch(
    model: Any,
    config: SparseConfig | None = None,
    profile: Profile | None = None,
    *,
    dry_run: Literal[True],
    dense_layers: DenseLayers = 0,
    dense_steps: int = 0,
    mask_steps: int = 1,
) -> Plan: ...


def patch(
    model: Any,
    config: SparseConfig | None = None,
    profile: Profile | None = None,
    dry_run: bool = False,
    *,
    dense_layers: DenseLayers = 0,
    dense_steps: int = 0,
    mask_steps: int = 1,
) -> Patch | Plan:
    """Let the attention layers of a model of transformers or diffusers run sparse, until `unpatch`.

    model         a model, or a pipeline of diffusers: then its transformers
    config        settings of every layer; the default needs no tuning
    profile       tuned settings by layer name; layers that it does not name follow config, and stay dense without one
    dry_run       change nothing, and return the Plan: each layer, what would happen, and why
    dense_layers  so many of the first layers stay dense, or those of these names (* stands for anything)
    dense_steps   so many of the first denoising steps stay dense
    mask_steps    choose masks anew in every so many denoising steps only, and use them in those between

    What cannot be sparse stays dense, with a DenseAttentionWarning that says why, once. Returns a Patch, to be used as
    a context manager or not.
    """
    model = _checked(model, config, profile, dry_run)
    _check_steps(dense_steps, mask_steps)
    parts = diffusers_models(model)
    by_hooks = bool(parts) or is_pipeline(model)
    if not by_hooks and (dense_steps, mask_steps) != (0, 1):
        name = "dense_steps" if dense_steps else "mask_steps"
        raise ValueError(f"{name} are steps of denoising, and {type(model).__name__} is no model of diffusers.")
    if by_hooks:
        layers = [one for prefix, part in parts.items() for one in diffusers_layers(part, config, profile, prefix)]
        check_profile(profile, layers, type(model).__name__)
        if not is_pipeline(model):
            layers += _beside(model, parts)
    else:
        layers = attention_layers(model, config, profile)
        if any(layer.settings is not None for layer in layers):
            whole_models(model)  # which refuses a part of a model, in a dry run too
    plan = Plan(type(model).__name__, tuple(keep_dense(layers, dense_layers)))
    if dry_run:
        return plan
    _warn(plan)
    if by_hooks:
        _hook(parts, plan, Steps(dense_steps, mask_steps))
    else:
        _switch(model, plan)
    return Patch(model, plan)


def unpatch(model: Any) -> None:
    """Give a patched model or pipeline, or a copy of one, back the attention that it had."""
    model = original(_checked_kind(model))
    patched = [part for part in _parts(model) if RECORD in vars(part)]
    if not patched:
        raise ValueError(f"{type(model).__name__} is not patched, so there is nothing to restore.")
    for part in patched:
        record: ImplementationSwitch | hooks.Installed | None = vars(part).pop(RECORD)
        hooks.abandon(part)
        if record is not None:
            record.restore()
        for module in part.modules():
            if SETTINGS in vars(module):
                delattr(module, SETTINGS)


def _beside(model: Any, parts: dict[str, Any]) -> list[Layer]:
    """Layers of models of transformers in a module that also holds models of diffusers: left alone, and said so."""
    why = "a model of transformers beside one of diffusers: patch it by itself"
    own = [one for one in attention_layers(model, None, None) if not any(map(one.name.startswith, parts))]
    return [replace(one, action=ALONE, why=why, settings=None) for one in own if one.settings is not None]


def _switch(model: Any, plan: Plan) -> None:
    """A model of transformers is told to use another attention implementation."""
    taken = {layer.name: layer for layer in plan.layers if layer.settings is not None}
    switch = None
    if taken:
        register()
        others = [model.get_submodule(layer.name) for layer in plan.layers if layer.settings is None]
        switch = ImplementationSwitch(model, NAME, [one.config for one in others if reads_implementation(type(one))])
    setattr(model, RECORD, switch)
    for name, layer in taken.items():
        setattr(model.get_submodule(name), SETTINGS, layer.settings)


def _hook(parts: dict[str, Any], plan: Plan, steps: Steps) -> None:
    """Models of diffusers get hooks. Those of one pipeline count its steps together."""
    taken = {layer.name: layer.settings for layer in plan.layers if layer.settings is not None}
    for prefix, part in parts.items():
        layers = {name[len(prefix) :]: own for name, own in taken.items() if name.startswith(prefix)}
        wanted = any(own.config is not None for own in layers.values())
        setattr(part, RECORD, hooks.install(part, layers, steps) if wanted else None)


def _check_steps(dense_steps: object, mask_steps: object) -> None:
    for name, count, least in (("dense_steps", dense_steps, 0), ("mask_steps", mask_steps, 1)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a number of steps, {least} or more, not {count!r}.")


def _checked(model: Any, config: object, profile: object, dry_run: object) -> Any:
    model = original(_checked_kind(model))
    for name, value, kind in (("config", config, SparseConfig), ("profile", profile, Profile)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a sparge.{kind.__name__}, not {type(value).__name__}.")
    if not isinstance(dry_run, bool):
        raise TypeError(f"dry_run must be True or False, not {dry_run!r}.")
    modules = [module for part in _parts(model) for module in part.modules()]
    if not dry_run and any(not {SETTINGS, RECORD}.isdisjoint(vars(module)) for module in modules):
        raise ValueError(f"{type(model).__name__} is already patched; call sparge.unpatch on it first.")
    return model


def _checked_kind(model: object) -> Any:
    if not isinstance(model, torch.nn.Module) and not is_pipeline(model):
        raise TypeError(f"sparge patches a model of transformers or diffusers, not {type(model).__name__}.")
    return model


def _parts(model: Any) -> list[Any]:
    """The modules that carry the record of a patch: models of diffusers, or the model itself."""
    return list(diffusers_models(model).values()) or ([] if is_pipeline(model) else [model])


def _warn(plan: Plan) -> None:
    """One sentence per patch for what will not be sparse."""
    if not plan.layers:
        what = "has no attention layer that sparge knows, and is left as it is; `with sparge.patched():` reaches code "
        text = f"{plan.model} {what}that calls torch's scaled_dot_product_attention."
    else:
        others = [layer for layer in plan.layers if layer.action != SPARSE and not layer.as_meant]
        if not others:
            return
        reasons = "; ".join(dict.fromkeys(f"{layer.name}: {layer.why}" for layer in _first_per_reason(others)))
        text = f"{len(others)} of {len(plan.layers)} attention layers of {plan.model} will not be sparse ({reasons})."
    warnings.warn(text, DenseAttentionWarning, stacklevel=3)


def _first_per_reason(layers: Sequence[Layer]) -> list[Layer]:
    return list({layer.why: layer for layer in reversed(layers)}.values())[::-1]


def _shown(number: int | None) -> str:
    return "?" if number is None else str(number)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
