"""The attention layers of a model, and what sparge would do with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparge.config import SparseConfig
from sparge.inputs import DTYPES
from sparge.integrations.layers import (
    ALONE,
    DENSE,
    SPARSE,
    Layer,
    LayerSettings,
    check_profile,
    head_dim_refusal,
    settings_of,
)
from sparge.integrations.transformers.attention import NOBODY
from sparge.integrations.transformers.interface import (
    calls_interface,
    forward_words,
    is_model,
    reads_implementation,
    takes_others,
)
from sparge.profile import Profile

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")


def attention_layers(model: Any, config: SparseConfig | None, profile: Profile | None) -> list[Layer]:
    """Every attention layer of a model, in its order.

    With a profile, layers that it does not name follow `config`, and stay dense without one.
    """
    modules = list(_attention_modules(model))
    stubborn = {id(module.config): module for _, module in modules if _must_be_left_alone(module)}
    models = {name: part for name, part in model.named_modules() if is_model(type(part))}
    found = []
    for name, module in modules:
        owner = _innermost(models, name)
        if calls_interface(type(module)) and owner is not None and not takes_others(type(owner)):
            why = f"{type(owner).__name__} supports no other attention than its own"
            found.append(Layer(name, type(module).__name__, *_sizes(module), ALONE, why, None))
        else:
            found.append(_layer(name, module, stubborn.get(id(getattr(module, "config", None))), config, profile))
    check_profile(profile, found, type(model).__name__)
    return found


def _innermost(models: dict[str, Any], name: str) -> Any | None:
    """The model that a module belongs to, of those that may lie inside each other."""
    around = [prefix for prefix in models if not prefix or f"{name}.".startswith(f"{prefix}.")]
    return models[max(around, key=len)] if around else None


def _sizes(module: Any) -> tuple[int | None, int | None]:
    """Heads and their channels, where the module or its config says them."""
    return _number(module, HEAD_COUNTS), _number(module, HEAD_DIMS)


def _attention_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that call transformers' attention interface, and those called attention that compute it themselves."""
    outer: tuple[str, ...] = ()  # prefixes of what lies inside the latter
    for name, module in model.named_modules():
        if calls_interface(type(module)):
            yield name, module
        elif "Attention" in type(module).__name__ and not any(calls_interface(type(part)) for part in module.modules()):
            if not any(map(name.startswith, outer)):
                yield name, module
            outer += (f"{name}.",)


def _must_be_left_alone(module: Any) -> bool:
    """Whether the layer would go wrong under an implementation it does not know; its config is shared by others."""
    kind = type(module)
    own_keys = not forward_words(kind).isdisjoint(NOBODY)
    return reads_implementation(kind) and (own_keys or not calls_interface(kind))


def _layer(name: str, module: Any, stubborn: Any | None, config: SparseConfig | None, profile: Profile | None) -> Layer:
    """`stubborn`: a layer under the same config that must be left alone, and this one with it."""
    kind, (heads, head_dim) = type(module).__name__, _sizes(module)

    def layer(action: str, why: str, settings: LayerSettings | None = None) -> Layer:
        return Layer(name, kind, heads, head_dim, action, why, settings)

    if not calls_interface(type(module)):
        return layer(ALONE, "it computes attention itself, not through transformers' interface")
    if stubborn is not None:
        own = "chooses its keys itself" if calls_interface(type(stubborn)) else "computes attention itself"
        return layer(ALONE, f"{type(stubborn).__name__} {own}")
    settings = settings_of(name, config, profile)
    if settings.config is None:
        return layer(DENSE, "the profile does not name it, and no config is given", settings)
    if heads is not None:
        settings.config.check_heads(heads)
    reason = _why_dense(module, head_dim)
    if reason is not None:
        return layer(DENSE, reason, LayerSettings(None))
    weight = next((x for x in module.parameters() if x.is_floating_point()), None)
    if weight is not None and weight.dtype not in DTYPES:  # a model may be converted later: its calls will tell
        return layer(DENSE, f"{weight.dtype} is not float16, bfloat16 or float32", settings)
    window = getattr(module, "sliding_window", None)
    by = "as the profile says" if settings.tuned else f"rule {' or '.join(settings.config.rule)}"
    exact = "" if window is None or settings.tuned else f"; exact where its window of {window} binds"
    return layer(SPARSE, by + exact, settings)


def _why_dense(module: Any, head_dim: int | None) -> str | None:
    """What will hold for every call."""
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None:
        return f"its scores are soft-capped at {softcap:g}"
    if "s_aux" in forward_words(type(module)):
        return "its softmax has attention sinks"
    if "position_bias" in forward_words(type(module)):
        return "its scores have a position bias"
    return head_dim_refusal(head_dim)


def _number(module: Any, names: tuple[str, ...]) -> int | None:
    """The layer's own number under one of these names, or that of its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
