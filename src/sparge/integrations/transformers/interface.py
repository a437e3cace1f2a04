"""How transformers is told of an attention implementation, and how models are switched to one and back."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


def no_mask(*_: Any, **__: Any) -> None:
    """For whole prefills without padding: the causal order is all there is."""


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any] = no_mask) -> None:
    """Both functions at once: without a mask function, masks would silently arrive as None."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


@dataclass
class _Switched:
    """A config whose implementation was replaced: what it was, and for how many models that share it."""

    config: weakref.ref[Any]
    implementation: str
    models: int = 0


_switched: dict[int, _Switched] = {}  # by id: configs compare by value, and must not be written to for this


def implementation_before(config: Any) -> str | None:
    """What a config asked for before models that have it were switched; None if none is."""
    found = _switched.get(id(config))
    return None if found is None or found.config() is not config else found.implementation


def _switch(config: Any) -> str:
    """Count one more model of this config; returns what it asked for before the first."""
    implementation: str = implementation_before(config) or config._attn_implementation
    if implementation_before(config) is None:
        number = id(config)
        gone = weakref.ref(config, lambda _: _switched.pop(number, None))
        _switched[number] = _Switched(gone, implementation)
    _switched[id(config)].models += 1
    return implementation


def whole_models(model: Any) -> list[Any]:
    """The modules whose implementation can be set."""
    models = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    if not models:
        raise TypeError(f"{type(model).__name__} is a part of a model of transformers: pass the whole model.")
    return models


class ImplementationSwitch:
    """A model and its parts switched to one attention implementation, until `restore`; parts can be left out.

    Models may share a config: it is given back what it asked for when the last of them is restored.
    """

    def __init__(self, model: Any, name: str, left_out: Sequence[Any] = ()) -> None:
        models = whole_models(model)
        self.before = [(config, _switch(config)) for config in _configs(model)]
        for part in models:  # one that is inside another is switched already, which changes nothing
            part.set_attn_implementation(name)
        for config, implementation in self.before:
            if any(config is one for one in left_out):
                config._attn_implementation_internal = implementation

    def restore(self) -> None:
        for config, implementation in self.before:
            if implementation_before(config) is not None:  # a copy of a switched model has configs of its own
                _switched[id(config)].models -= 1
                if _switched[id(config)].models > 0:
                    continue
                del _switched[id(config)]
            config._attn_implementation_internal = implementation  # the public setter would reach into sub-configs


def is_model(kind: type) -> bool:
    return hasattr(kind, "_supports_sdpa")


def takes_others(kind: type) -> bool:
    """Whether a class of models says that its layers are right under other implementations than its own.

    Masks for those leave causal order to the layers, and elsewhere `is_causal` may be missing, or wrong.
    """
    return bool(kind._supports_sdpa or getattr(kind, "_supports_attention_backend", False))  # type: ignore[attr-defined]


def calls_interface(kind: type) -> bool:
    """Whether modules of this class leave attention to the implementation that their config names."""
    return "ALL_ATTENTION_FUNCTIONS" in forward_words(kind)


def reads_implementation(kind: type) -> bool:
    """Whether modules of this class ask their config which implementation to use."""
    return "_attn_implementation" in forward_words(kind)


def forward_words(kind: type) -> set[str]:
    """The names and keyword arguments in the code of a class's forward."""
    forward = getattr(kind, "forward", None)
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return set()
    words: set[str] = set(code.co_names)
    for constant in code.co_consts:
        parts = constant if isinstance(constant, tuple) else (constant,)
        words.update(part for part in parts if isinstance(part, str))
    return words


def _configs(model: Any) -> Iterator[Any]:
    """The configs of a model and its parts, each once."""
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen.add(id(config))
        waiting += [getattr(config, name, None) for name in config.sub_configs]
        yield config
