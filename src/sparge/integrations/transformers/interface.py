"""How transformers is told of an attention implementation, and how models are switched to one and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def no_mask(*_: Any, **__: Any) -> None:
    """For whole prefills without padding: the causal order is all there is."""


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any] = no_mask) -> None:
    """Both functions at once: without a mask function, masks would silently arrive as None."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


class ImplementationSwitch:
    """A model and its parts switched to one attention implementation, until `restore`; parts can be left out."""

    def __init__(self, model: Any, name: str, left_out: Sequence[Any] = ()) -> None:
        self.before = [(config, config._attn_implementation) for config in _configs(model)]
        model.set_attn_implementation(name)
        for config, implementation in self.before:
            if any(config is one for one in left_out):
                config._attn_implementation_internal = implementation

    def restore(self) -> None:
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation  # the public setter would reach into sub-configs


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
