"""What goes on inside a model while it runs sparse: which module computes attention, in which forward, and how well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sparge.api import Run
from sparge.evaluate.vision import Sparse, now
from sparge.integrations.diffusers.order import Grid, Layout
from sparge.integrations.diffusers.running import current
from sparge.integrations.layers import Layer
from sparge.integrations.torch_sdpa import redirected, torch_attention
from sparge.observe import observed
from sparge.report.findings import LayerFindings, Seconds, look_at
from sparge.report.mass import exact_attention
from sparge.report.orders import Orders

OnLayer = Callable[[str], None]
Parts = Mapping[str, Any]  # models, by what comes before the names of their modules
NOWHERE = "outside of the model"


@dataclass
class Look:
    """The layers that were looked at, in the order of their calls, and what was planned for each."""

    layers: list[LayerFindings] = field(default_factory=list)
    planned: tuple[Layer, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)  # by the layer's name: why a call of it had to be dense
    order: dict[str, Any] | None = None  # the Hilbert order of the tokens, where they have a grid
    interrupted: bool = False


@dataclass
class Forward:
    """One forward of a model."""

    seconds: float = 0.0
    heads: int = 0  # that sparge computed in it


class Watch:
    """Which module is running, and in which forward of its model."""

    def __init__(self) -> None:
        self.forwards: dict[str, list[Forward]] = {}
        self.running: str | None = None  # the model
        self._modules: list[str] = []

    @property
    def module(self) -> str:
        """The innermost that is running."""
        return self._modules[-1] if self._modules else NOWHERE

    @property
    def number(self) -> int:
        """Of the running forward, counted from 0."""
        return -1 if self.running is None else len(self.forwards[self.running]) - 1

    def count(self, run: Run) -> None:
        if self.running is not None:
            self.forwards[self.running][-1].heads += run.inputs.query.shape[1]

    def begin(self, model: str, *_: Any) -> None:
        self.running = model
        self.forwards.setdefault(model, []).append(Forward(-now()))

    def end(self, model: str, *_: Any) -> None:
        self.forwards[model][-1].seconds += now()
        self.running = None

    def enter(self, module: str, *_: Any) -> None:
        self._modules.append(module)

    def leave(self, *_: Any) -> None:
        self._modules.pop()


@contextmanager
def watched(parts: Parts, modules: bool = False) -> Iterator[Watch]:
    """Inside the block the forwards of some models are timed, and with `modules` it is known which module runs."""
    watch, hooks = Watch(), []
    for prefix, part in parts.items():
        hooks.append(part.register_forward_pre_hook(partial(watch.begin, prefix)))
        hooks.append(part.register_forward_hook(partial(watch.end, prefix), always_call=True))
        for name, module in part.named_modules() if modules else ():
            full = prefix + name if name else type(part).__name__
            hooks.append(module.register_forward_pre_hook(partial(watch.enter, full)))
            hooks.append(module.register_forward_hook(watch.leave, always_call=True))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def look_inside(
    parts: Parts,
    planned: tuple[Layer, ...],
    sparse: Sparse,
    run: Callable[[], object],
    side: int,
    on_layer: OnLayer,
    chosen: Mapping[str, int] | None = None,
    grid: Grid | None = None,
) -> Look:
    """run() once, sparse, and looked at from inside. Ctrl-C keeps the layers that are done.

    side    of the pictures, in patches
    chosen  the forward to look at, for each of the models; None: all that runs
    grid    of the tokens of a model that puts them in Hilbert order itself
    """
    look, found, orders = Look(planned=planned), dict[str, list[LayerFindings]](), Orders()

    def keep(run: Run) -> None:
        if chosen is not None and (watch.running is None or chosen.get(watch.running) != watch.number):
            return
        name = watch.module
        with redirected(torch_attention):  # what is timed here as torch's attention is to be torch's
            exact = exact_attention(run.inputs, run.choice.config.block)
            one, layout = look_at(run, name, side, exact), _layout(grid)
            if layout is not None:
                orders.add(run, layout, one, exact.values)
        found.setdefault(name, []).append(one)
        on_layer(name)

    def refuse(reason: str) -> None:
        look.refused.setdefault(watch.module, reason)

    try:
        with watched(parts, modules=True) as watch, sparse(), observed(keep, refuse):
            run()
    except KeyboardInterrupt:
        look.interrupted = True
    look.layers, look.order = [together(calls) for calls in found.values()], orders.drawn()
    return look


def _layout(grid: Grid | None) -> Layout | None:
    """Where the tokens of the running call stand."""
    if grid is not None:
        return Layout((grid,), text_first=False)
    forward = current()
    return forward.layout if forward is not None and isinstance(forward.layout, Layout) else None


def together(calls: Sequence[LayerFindings]) -> LayerFindings:
    """Several calls of one layer in one forward, such as prompt by prompt: work and time in all, errors on average."""
    first, times = calls[0], [call.seconds for call in calls]
    if len(calls) == 1:
        return first
    return replace(
        first,
        executed=_sums([call.executed for call in calls]),
        visible=_sums([call.visible for call in calls]),
        error=_means([call.error for call in calls]),
        missed=_means([call.missed for call in calls]),
        skipped_values=_means([call.skipped_values for call in calls]),
        seconds=Seconds(
            sum(one.prediction for one in times),
            sum(one.quantization for one in times),
            sum(one.attention for one in times),
            sum(one.dense for one in times),
        ),
    )


def _sums(calls: Sequence[Sequence[int]]) -> list[int]:
    return [sum(values) for values in zip(*calls, strict=True)]


def _means(calls: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(calls) for values in zip(*calls, strict=True)]
