"""Module hooks that let a model of diffusers run with sparge; torch copies and pickles them with the model."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparge.integrations.diffusers.backend import NAME, sdpa_of_layer
from sparge.integrations.diffusers.families import FAMILIES, Family, why_not_once
from sparge.integrations.diffusers.masks import Masks
from sparge.integrations.diffusers.order import Layout
from sparge.integrations.diffusers.registration import register
from sparge.integrations.diffusers.running import Forward, RunningLayer, current, enter, leave
from sparge.integrations.diffusers.steps import Steps
from sparge.integrations.fallback import warn_once
from sparge.integrations.layers import LayerSettings
from sparge.integrations.torch_sdpa import redirected
from sparge.library import is_traced

BACKEND = "_attention_backend"  # the attribute of processors that go through diffusers' dispatcher
COMPILED = "torch.compile does not see which layer of a patched model it is in, and where its tokens stand."


@dataclass(frozen=True)
class Installed:
    """The hooks of a patched model."""

    handles: tuple[Any, ...]

    def restore(self) -> None:
        for handle in self.handles:
            handle.remove()


def install(
    model: Any, layers: Mapping[str, LayerSettings], steps: Steps, attend: Callable[..., Any] | None = None
) -> Installed:
    """Hook a model, and the attention layers of these names.

    attend  computes the layers instead of sparge.attention: attend(layer name, ...), then the same arguments
    """
    if any(isinstance(hook, EnterModel) for hook in model._forward_pre_hooks.values()):
        raise ValueError(f"{type(model).__name__} is already patched; call sparge.unpatch on it first.")
    register()
    family = FAMILIES[type(model).__name__]
    handles = [
        model.register_forward_pre_hook(EnterModel(steps), with_kwargs=True, prepend=True),
        model.register_forward_hook(LeaveModel(), always_call=True),
        model.get_submodule(family.embedding).register_forward_hook(OrderEmbedded(type(model).__name__)),
        model.get_submodule(family.last).register_forward_pre_hook(RestoreOrder()),
    ]
    if family.rotary is not None:
        handles.append(model.get_submodule(family.rotary).register_forward_hook(OrderRotary(family.rotary_dim)))
    for name, settings in layers.items():
        layer = model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(EnterLayer(name, settings, attend), with_kwargs=True))
        handles.append(layer.register_forward_hook(LeaveLayer(), always_call=True))
    return Installed(tuple(handles))


def abandon(model: Any) -> None:
    """Undoes what a forward of this model has left behind that was broken off: torch runs no hook after Ctrl-C."""
    forward = current()
    if forward is not None and forward.model is model:
        forward.undo.close()
        leave(model)


class EnterModel:
    """Learns the grid of a call, and the step it belongs to."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.masks = steps, Masks()

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_traced():
            warn_once(type(model).__name__, COMPILED)
            return None
        abandon(model)
        family = FAMILIES[type(model).__name__]
        kind: Any = type(model)
        names = _parameters(kind)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        layout = _layout(model, family, arguments)
        in_order = isinstance(layout, Layout) and why_not_once(model, family, arguments) is None
        self.steps.begin(arguments.get("timestep"))
        enter(Forward(model, current(), layout, in_order, self.steps.is_dense, self._by_kept_masks()))
        rotary = family.rotary_argument
        if not isinstance(layout, Layout) or not in_order or rotary is None or arguments.get(rotary) is None:
            return None
        ordered = _rotary_in_order(arguments[rotary], layout, family.rotary_dim)
        if rotary in kwargs:
            return args, {**kwargs, rotary: ordered}
        place = names.index(rotary)
        return (*args[:place], ordered, *args[place + 1 :]), kwargs

    def _by_kept_masks(self) -> Callable[..., Any] | None:
        """Who computes attention where masks last for several steps."""
        steps = self.steps
        if steps.mask_steps == 1 or steps.is_dense:
            return None
        if steps.chooses_masks and steps.call == 0:
            self.masks.kept.clear()
        call, anew = steps.call, steps.chooses_masks
        counted: Counter[str] = Counter()

        def attention(layer: str, *tensors: Any, **arguments: Any) -> Tensor:
            counted[layer] += 1  # a layer may be called several times in a forward
            return self.masks.attention((layer, counted[layer], call), anew, *tensors, **arguments)

        return attention


class LeaveModel:
    """Also called when the model fails."""

    def __call__(self, model: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave(model)


class OrderEmbedded:
    """Puts the visual tokens in order once they are embedded."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        layout = _order_for_all_layers()
        return output if layout is None else FAMILIES[self.model].embedded(output, layout)


class OrderRotary:
    """Puts the rotary embedding in the same order."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def __call__(self, module: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layout = _order_for_all_layers()
        return output if layout is None else _rotary_in_order(output, layout, self.dim)


class RestoreOrder:
    """Puts the visual tokens back, before whatever comes after the blocks."""

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        layout = _order_for_all_layers()
        return args if layout is None else (layout.restore(args[0], 1), *args[1:])


class EnterLayer:
    """Tells sparge which layer is running, and lets its attention come to sparge."""

    def __init__(self, name: str, settings: LayerSettings, attend: Callable[..., Any] | None) -> None:
        self.name, self.settings, self.attend = name, settings, attend

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> None:
        kind = type(layer).__name__
        if torch.compiler.is_compiling():
            warn_once(kind, COMPILED)
            return
        forward = current()
        if forward is None:
            warn_once(kind, "it was called outside its model, which knows where its tokens stand.")
            return
        processor = layer.processor
        attend = self.attend and partial(self.attend, self.name)
        if forward.dense_step:
            forward.layer = RunningLayer(kind, LayerSettings(None))
        elif hasattr(processor, BACKEND):
            usual = forward.undo.enter_context(_dispatched_to_sparge(processor))
            forward.layer = RunningLayer(kind, self.settings, self.name, usual, attend)
        else:  # it calls torch itself
            forward.layer = RunningLayer(kind, self.settings, self.name, attend=attend)
            forward.undo.enter_context(redirected(sdpa_of_layer))


class LeaveLayer:
    """Also called when the layer fails."""

    def __call__(self, layer: Any, args: Any, output: Any) -> None:
        forward = None if torch.compiler.is_compiling() else current()
        if forward is not None:
            forward.layer = None
            forward.undo.close()


@dataclass
class _Loan:
    """A processor whose backend is sparge for now, in one thread or several."""

    users: int
    own: dict[str, Any]  # the name of the backend that somebody gave this processor, if anybody did


_lock = threading.Lock()
_loans: WeakKeyDictionary[Any, _Loan] = WeakKeyDictionary()


@contextmanager
def _dispatched_to_sparge(processor: Any) -> Iterator[Any]:
    """Inside the block the processor names sparge as its backend; the value is the one that it has otherwise."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    with _lock:
        loan = _loans.get(processor)
        if loan is None:
            own = {name: value for name, value in vars(processor).items() if name == BACKEND}
            loan = _loans[processor] = _Loan(0, own)
            setattr(processor, BACKEND, AttentionBackendName(NAME))
        loan.users += 1
    try:
        yield loan.own.get(BACKEND, getattr(type(processor), BACKEND, None))
    finally:
        with _lock:
            loan.users -= 1
            if loan.users == 0:
                del _loans[processor]
                delattr(processor, BACKEND)
                for name, value in loan.own.items():
                    setattr(processor, name, value)


def _order_for_all_layers() -> Layout | None:
    """The layout of the running call, if its tokens are to be put in order once."""
    forward = None if torch.compiler.is_compiling() else current()
    return forward.layout if forward is not None and forward.in_order else None  # type: ignore[return-value]


def _rotary_in_order(embedding: tuple[Tensor, ...], layout: Layout, dim: int) -> tuple[Tensor, ...]:
    return tuple(layout.apply(part, dim) for part in embedding)


def _layout(model: Any, family: Family, arguments: dict[str, Any]) -> Layout | str:
    """Where the tokens of a call stand, or why that is not known."""
    if not isinstance(arguments.get("hidden_states"), Tensor):
        return "the call has no hidden_states."  # the model will say so
    try:
        return Layout(family.grids(model.config, arguments), family.text_first)
    except ValueError as error:
        return str(error)


@lru_cache(maxsize=64)
def _parameters(kind: Any) -> tuple[str, ...]:
    """The names of a model's arguments, in their order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
