"""What a patched model tells its attention layers while it runs: attention functions are handed tensors only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sparge.integrations.diffusers.order import Layout
from sparge.integrations.layers import LayerSettings


@dataclass(frozen=True)
class RunningLayer:
    """The layer whose attention is being computed."""

    kind: str
    settings: LayerSettings
    name: str = ""
    dense_backend: Any = None  # the backend of diffusers that the layer has without sparge; None: diffusers' default
    attend: Callable[..., Any] | None = None  # who computes it in place of sparge.attention, with the same arguments


@dataclass
class Forward:
    """One call of a patched model."""

    model: Any
    outer: Forward | None  # the call that this one is inside of
    layout: Layout | str  # or why it is not known
    in_order: bool  # whether the visual tokens have been put in order for all layers
    dense_step: bool
    attention: Callable[..., Any] | None = None  # attention(layer name, ...) in place of sparge.attention
    layer: RunningLayer | None = None
    undo: ExitStack = field(default_factory=ExitStack)  # what was done so that the layer's attention comes to sparge


_forward: ContextVar[Forward | None] = ContextVar("sparge_forward", default=None)


def current() -> Forward | None:
    """The call that is running in this thread."""
    return _forward.get()


def enter(forward: Forward) -> None:
    _forward.set(forward)


def leave(model: Any) -> None:
    """Also right where a call failed before it entered."""
    forward = _forward.get()
    if forward is not None and forward.model is model:
        _forward.set(forward.outer)
