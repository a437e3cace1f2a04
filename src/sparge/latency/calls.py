"""The attention calls of a model that sparge will take: seen in a dense step, to be made again alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparge.config import SparseConfig
from sparge.integrations.diffusers.families import family_of
from sparge.integrations.diffusers.order import Layout
from sparge.integrations.torch_sdpa import redirected
from sparge.latency.dense import DenseAttention, kind_of


@dataclass(frozen=True)
class Call:
    """The first of several calls that differ in nothing but their numbers; heads come first."""

    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]  # of torch's function
    count: int  # per step


@contextmanager
def recorded(network: Any, layers: Sequence[str], dense: DenseAttention) -> Iterator[dict[Hashable, Call]]:
    """Inside the block attention is computed by `dense`; the value fills with the calls from inside these layers."""
    calls: dict[Hashable, Call] = {}
    running: list[str] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        if running:
            kind = kind_of(query, key, value, arguments)
            known = calls.get(kind) or Call(query, key, value, arguments, count=0)
            calls[kind] = replace(known, count=known.count + 1)
        return dense(query, key, value, **arguments)

    handles = []
    for name in layers:
        layer = network.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(layer.register_forward_hook(lambda *_: running.clear(), always_call=True))
    try:
        with redirected(attend):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def protecting_text(config: SparseConfig, network: Any, inputs: dict[str, Any], length: int) -> SparseConfig:
    """What a patch makes of a config for a sequence of this length."""
    family = family_of(network)
    if family is None:
        return config
    text = Layout(family.grids(network.config, inputs), family.text_first).text_range(length)
    return config if text[0] == text[1] else replace(config, protected=(text,))
