"""What kernels are given besides the problem's own tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.inputs import Inputs


@functools.cache
def _no_skip(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=256)
def no_skips(device: torch.device, batch: int, heads: int) -> Tensor:
    return _no_skip(device).expand(batch, heads)


@functools.lru_cache(maxsize=256)
def _per_head(config: SparseConfig, name: str, heads: int, device: torch.device) -> Tensor:
    """A setting on the device; cached, because the copy there would synchronise."""
    return config.per_head(name, heads, device, torch.float64 if name == "topk" else torch.float32)


def setting(config: SparseConfig, name: str, inputs: Inputs, used: bool) -> Tensor:
    """A setting per head; kernels that do not use it get a pointer they never read."""
    return _per_head(config, name, inputs.query.shape[1], inputs.query.device) if used else inputs.query


def either(x: Tensor | None, unused: Tensor) -> Tensor:
    """A tensor, or a pointer that the kernel never reads."""
    return unused if x is None else x


class ScratchLayout:
    """Where each of several pieces of 32-bit numbers begins; worked out once for a problem."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths, self.begins, self.length = lengths, dict[str, int](), 0
        for name, length in lengths.items():
            self.begins[name] = self.length
            self.length += -(-length // 64) * 64


class Scratch:
    """Uninitialised pieces in one allocation. Most are only ever known by their address."""

    def __init__(self, like: Tensor, layout: ScratchLayout) -> None:
        self.layout, self.numbers = layout, like.new_empty(layout.length, dtype=torch.float32)

    def piece(self, name: str) -> Tensor:
        begin = self.layout.begins[name]
        return self.numbers[begin : begin + self.layout.lengths[name]]

    def shaped(self, name: str, a: int, b: int, c: int) -> Tensor:
        """A piece as [a, b, c]."""
        return self.numbers.as_strided((a, b, c), (b * c, c, 1), self.layout.begins[name])


@dataclass(frozen=True)
class Operands:
    """What several launches read and write, in their order: tensors, and pieces of scratch by name.

    Called, they are tensors all, as Triton wants to see them at a kernel's first launch.
    """

    scratch: Scratch
    items: Sequence[Tensor | str]
    integers: Sequence[str]  # pieces that hold int32

    def __call__(self) -> list[Tensor]:
        return [self.tensor(n) for n in range(len(self.items))]

    def addresses(self) -> list[int]:
        first, begins = self.scratch.numbers.data_ptr(), self.scratch.layout.begins
        return [first + 4 * begins[x] if isinstance(x, str) else x.data_ptr() for x in self.items]

    def tensor(self, n: int) -> Tensor:
        item = self.items[n]
        if isinstance(item, str):
            piece = self.scratch.piece(item)
            return piece.view(torch.int32) if item in self.integers else piece
        return seen_by_kernels([item])[0]


def seen_by_kernels(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Kernels read flags as bytes."""
    return [x.view(torch.int8) if x.dtype == torch.bool else x for x in tensors]


def sequence_ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Sequence ends of queries and keys."""
    packing = inputs.packing
    return (inputs.query, inputs.key) if packing is None else (packing.q_ends, packing.k_ends)
