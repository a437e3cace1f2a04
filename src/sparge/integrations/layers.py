"""One attention layer of a model, and what a patch has decided for it; the same for every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sparge.config import SparseConfig
from sparge.inputs import MAX_HEAD_DIM, MIN_HEAD_DIM
from sparge.profile import Profile, ProfileError

SPARSE, DENSE, ALONE = "sparse", "dense", "left alone"

DenseLayers = int | str | Sequence[str]  # how many of the first, or patterns of names


@dataclass(frozen=True)
class LayerSettings:
    """What a patch tells one layer."""

    config: SparseConfig | None  # None: dense
    tuned: bool = False  # whether the config is this layer's own, from a profile


@dataclass(frozen=True)
class Layer:
    """One attention layer: what will happen to it, and why."""

    name: str
    kind: str
    heads: int | None  # None: the layer does not say
    head_dim: int | None
    action: str  # "sparse", "dense" (sparge hands its calls on) or "left alone" (sparge is never called)
    why: str
    settings: LayerSettings | None = None  # None: left alone
    as_meant: bool = False  # whether nobody would expect it to be sparse, so that no warning is due


def settings_of(name: str, config: SparseConfig | None, profile: Profile | None) -> LayerSettings:
    """With a profile, layers that it does not name follow `config`, and stay dense without one."""
    if profile is None:
        return LayerSettings(SparseConfig() if config is None else config)
    if name in profile.layers:
        return LayerSettings(profile.config_for(name), tuned=True)
    return LayerSettings(config)


def check_profile(profile: Profile | None, layers: Sequence[Layer], model: str) -> None:
    """Raise if a profile names layers that are not there."""
    strangers = set(profile.layers) - {layer.name for layer in layers} if profile is not None else set()
    if profile is not None and strangers:
        raise ProfileError(
            f"the profile of {profile.model} names {len(strangers)} layers that {model} does not have, "
            f"the first of them {min(strangers)!r}."
        )


def head_dim_refusal(head_dim: int | None) -> str | None:
    if head_dim is not None and not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    return None


def keep_dense(layers: Sequence[Layer], chosen: DenseLayers) -> list[Layer]:
    """The layers, those that `chosen` means now dense: the first so many that would be sparse, or by name."""
    if isinstance(chosen, int) and not isinstance(chosen, bool) and chosen >= 0:
        names = {layer.name for layer in [one for one in layers if one.action == SPARSE][:chosen]}
        why = f"it is one of the first {chosen}, kept dense as asked"
    else:
        names, why = _named(layers, chosen), "kept dense as asked"
    return [
        replace(layer, action=DENSE, why=why, settings=LayerSettings(None), as_meant=True)
        if layer.name in names and layer.action == SPARSE
        else layer
        for layer in layers
    ]


def _named(layers: Sequence[Layer], chosen: object) -> set[str]:
    patterns = (chosen,) if isinstance(chosen, str) else chosen
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"dense_layers must be a number of layers, 0 or more, or names of layers such as "
            f"'transformer_blocks.0.*', not {chosen!r}."
        )
    names: set[str] = set()
    for pattern in patterns:
        found = {layer.name for layer in layers if fnmatchcase(layer.name, pattern)}
        if not found:
            raise ValueError(f"dense_layers names {pattern!r}, and no attention layer of the model is called so.")
        names |= found
    return names
