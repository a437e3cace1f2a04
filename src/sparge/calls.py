"""Calls like earlier ones: what was checked and chosen for those holds for these, and is not worked out again.

A model makes the same call in every layer and step. Checking it, choosing a backend and describing the problem take the
host longer than short attention takes the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparge import backends
from sparge.backends import Choice
from sparge.backends.dense import DenseBackend, DensePlan
from sparge.backends.triton.launch import TritonBackend, on_device
from sparge.config import SparseConfig
from sparge.inputs import Inputs, Signature, Window, restore
from sparge.replay import Recording, Replay, replay_of
from sparge.stages import Output
from sparge.visibility import Visibility

REMEMBERED = 4096  # kinds of call


@dataclass
class Known:
    """All of an earlier call but its tensors. The second call of a kind is recorded; later ones may be replayed."""

    scale: float
    visibility: Visibility
    layout: str
    needs_lse: bool
    signature: Signature
    choice: Choice
    dense: DensePlan | None  # where torch's own attention was chosen
    replay: Replay | None = None
    recorded: bool = field(default=False, repr=False)

    @property
    def to_record(self) -> bool:
        """Only where all that computes is a launch, or torch."""
        launches = isinstance(self.choice.backend, TritonBackend) and self.choice.config.max_error is None
        return launches and not self.recorded

    def keep(self, recording: Recording, inputs: Inputs, output: Output) -> None:
        """What was recorded, if it may be replayed."""
        self.recorded = True
        self.replay = replay_of(recording, (inputs.query, inputs.key, inputs.value), output)

    def again(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The output and the LSE, without a look at anything; None where the whole way has to be gone."""
        if self.dense is None and self.replay is None:
            return None
        query, key, value = heads_first(query, key, value, self.layout)
        if self.dense is not None:
            return restore(self.dense.attention(query, key, value), self.layout), None
        assert self.replay is not None
        with on_device(query):
            values, lse = self.replay(query, key, value)
        return restore(values, self.layout), lse

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        query, key, value = heads_first(query, key, value, self.layout)
        inputs = Inputs(query, key, value, self.scale, self.visibility, self.layout, self.needs_lse)
        inputs.__dict__["signature"] = self.signature
        return inputs


_known: dict[Hashable, Known] = {}


def kind_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    config: SparseConfig | None,
    window: Window | None,
    layout: str,
    return_lse: bool,
) -> Hashable:
    """Equal for two calls only if whatever was found out about one holds for the other; None: look at it anew."""
    tensors = (query, key, value)
    if attn_mask is not None or dropout_p != 0.0 or any(type(x) is not Tensor or x.requires_grad for x in tensors):
        return None
    if any(x.layout != torch.strided or x.is_nested or x.is_neg() for x in tensors):
        return None
    device = query.device
    if torch.is_autocast_enabled(device.type):
        return None
    kind = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, device, key.device, value.device,
        query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15,
        is_causal, scale, enable_gqa, config, window, layout, return_lse,
        # 1 equals True, and is refused where True is not
        *map(type, (is_causal, scale, enable_gqa, return_lse, *(window if isinstance(window, tuple) else ()))),
        device.type == "cuda" and torch.cuda.is_current_stream_capturing(), backends.BACKENDS,
    )  # fmt: skip
    try:
        hash(kind)
    except TypeError:  # a window given as a list, or something that will be refused
        return None
    return kind


def known_call(kind: Hashable) -> Known | None:
    return None if kind is None else _known.get(kind)


def forget() -> None:
    """Look at every call anew: for those who change what backends can do."""
    _known.clear()


def remember(kind: Hashable, inputs: Inputs, choice: Choice) -> None:
    if kind is None:
        return
    if len(_known) >= REMEMBERED:
        _known.clear()
    dense = None
    if isinstance(choice.backend, DenseBackend) and choice.config.max_error is None:
        dense = DensePlan.of(inputs)
    _known[kind] = Known(
        inputs.scale, inputs.visibility, inputs.layout, inputs.needs_lse, inputs.signature, choice, dense
    )


def heads_first(query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    if layout == "BSHD":
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return query, key, value
