"""sparge.patch: sparse attention for a model that one already has, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from sparge.config import SparseConfig
from sparge.integrations.fallback import DenseAttentionWarning
from sparge.integrations.transformers.attention import SETTINGS
from sparge.integrations.transformers.interface import ImplementationSwitch, reads_implementation
from sparge.integrations.transformers.layers import SPARSE, Layer, attention_layers
from sparge.integrations.transformers.registration import NAME, register
from sparge.profile import Profile

RECORD = "sparge_patch"  # the attribute of a patched model: how it was before; None: nothing was switched


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
        return self

    def __exit__(self, *_: object) -> None:
        if RECORD in vars(self.model):
            unpatch(self.model)

    def __str__(self) -> str:
        return str(self.plan)


@overload
def patch(
    model: Any, config: SparseConfig | None = None, profile: Profile | None = None, dry_run: Literal[False] = False
) -> Patch: ...


@overload
def patch(
    model: Any, config: SparseConfig | None = None, profile: Profile | None = None, *, dry_run: Literal[True]
) -> Plan: ...


def patch(
    model: Any, config: SparseConfig | None = None, profile: Profile | None = None, dry_run: bool = False
) -> Patch | Plan:
    """Let the attention layers of a model of transformers run sparse, until `unpatch`.

    config   settings of every layer; the default needs no tuning
    profile  tuned settings by layer name; layers that it does not name follow config, and stay dense without one
    dry_run  change nothing, and return the Plan: each layer, what would happen, and why

    What cannot be sparse stays dense, with a DenseAttentionWarning that says why, once. Returns a Patch, to be used as
    a context manager or not.
    """
    model = _checked(model, config, profile, dry_run)
    plan = Plan(type(model).__name__, tuple(attention_layers(model, config, profile)))
    if dry_run:
        return plan
    taken = {layer.name: layer for layer in plan.layers if layer.settings is not None}
    _warn(plan)
    switch = None
    if taken:
        register()
        others = [model.get_submodule(layer.name) for layer in plan.layers if layer.settings is None]
        switch = ImplementationSwitch(model, NAME, [one.config for one in others if reads_implementation(type(one))])
    setattr(model, RECORD, switch)
    for name, layer in taken.items():
        setattr(model.get_submodule(name), SETTINGS, layer.settings)
    return Patch(model, plan)


def unpatch(model: Any) -> None:
    """Give a patched model, or a copy of one, back the attention that it had."""
    model = _original(_checked_module(model))
    if RECORD not in vars(model):
        raise ValueError(f"{type(model).__name__} is not patched, so there is nothing to restore.")
    switch: ImplementationSwitch | None = vars(model).pop(RECORD)
    if switch is not None:
        switch.restore()
    for module in model.modules():
        if SETTINGS in vars(module):
            delattr(module, SETTINGS)


def _checked(model: Any, config: object, profile: object, dry_run: object) -> torch.nn.Module:
    original = _original(_checked_module(model))
    for name, value, kind in (("config", config, SparseConfig), ("profile", profile, Profile)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a sparge.{kind.__name__}, not {type(value).__name__}.")
    if not isinstance(dry_run, bool):
        raise TypeError(f"dry_run must be True or False, not {dry_run!r}.")
    if not dry_run and any(not {SETTINGS, RECORD}.isdisjoint(vars(module)) for module in original.modules()):
        raise ValueError(f"{type(original).__name__} is already patched; call sparge.unpatch on it first.")
    return original


def _checked_module(model: object) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"sparge patches a model of transformers, not {type(model).__name__}.")
    return model


def _original(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside what torch.compile returns."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _warn(plan: Plan) -> None:
    """One sentence per patch for what will not be sparse."""
    if not plan.layers:
        what = "has no attention layer that sparge knows, and is left as it is; `with sparge.patched():` reaches code "
        text = f"{plan.model} {what}that calls torch's scaled_dot_product_attention."
    else:
        others = [layer for layer in plan.layers if layer.action != SPARSE]
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
