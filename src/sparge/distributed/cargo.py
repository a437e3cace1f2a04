"""What travels around the ring: the keys and values of a rank, in the form its attention kernel reads.

Quantised ones travel quantised. A unit is 128 keys: the padding of 8-bit copies, and a multiple of every key block,
scale group and sampled tile, so that two units never share anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.distributed.sharding import Interval, Share, units_of
from sparge.distributed.wire import Shape
from sparge.inputs import Inputs
from sparge.quantization import KEYS_PER_SCALE, Quantized
from sparge.stages import Blocks

UNIT = 128


@dataclass(frozen=True)
class Part:
    """A tensor of whole units; `per_unit` entries of dimension `dim` belong to one."""

    tensor: Tensor
    dim: int
    per_unit: int

    def shape(self, units: int) -> Shape:
        shape = list(self.tensor.shape)
        shape[self.dim] = units * self.per_unit
        return tuple(shape)

    def resized(self, units: int) -> Part:
        """Cut or padded with zeros."""
        length, want = self.tensor.shape[self.dim], units * self.per_unit
        if length >= want:
            return replace(self, tensor=self.tensor.narrow(self.dim, 0, want))
        whole = self.tensor.new_zeros(self.shape(units))
        whole.narrow(self.dim, 0, length).copy_(self.tensor)
        return replace(self, tensor=whole)

    def taken(self, units: Sequence[int]) -> Tensor:
        """Some of the units, one after the other."""
        if len(units) * self.per_unit == self.tensor.shape[self.dim]:
            return self.tensor
        x, index = self._by_unit(self.tensor), torch.tensor(units, device=self.tensor.device)
        return x.index_select(self.dim, index).flatten(self.dim, self.dim + 1).view(self.tensor.dtype)

    def spread(self, taken: Tensor, units: Sequence[int], total: int) -> Part:
        """The reverse, among `total` units: zeros stand for the others."""
        if len(units) == total:
            return replace(self, tensor=taken)
        whole, index = taken.new_zeros(self.shape(total)), torch.tensor(units, device=taken.device)
        self._by_unit(whole).index_copy_(self.dim, index, self._by_unit(taken))
        return replace(self, tensor=whole)

    def piece(self, first: int, last: int) -> Tensor:
        """Units first ... last."""
        return self.tensor.narrow(self.dim, first * self.per_unit, (last - first) * self.per_unit)

    def _by_unit(self, x: Tensor) -> Tensor:
        plain = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # indexing does not know every 8-bit type
        by_unit: Tensor = plain.unflatten(self.dim, (x.shape[self.dim] // self.per_unit, self.per_unit))
        return by_unit


@dataclass(frozen=True)
class Cargo:
    """Keys and values of one rank, whole units of them."""

    parts: tuple[Part, ...]
    share: Share

    @classmethod
    def of(cls, blocks: Blocks, share: Share) -> Cargo:
        quantized, units = blocks.quantized, len(units_of(share, UNIT))
        if quantized is None:
            parts = [Part(blocks.inputs.key, 2, UNIT), Part(blocks.inputs.value, 2, UNIT)]
        else:
            parts = [
                Part(quantized.key, 2, UNIT),
                Part(quantized.value, 3 if quantized.values_transposed else 2, UNIT),
                Part(quantized.key_scale, 2, UNIT // KEYS_PER_SCALE),
            ]
        return cls(tuple(part.resized(units) for part in parts), share)

    @property
    def tensors(self) -> list[Tensor]:
        return [part.tensor for part in self.parts]

    def taken(self, units: Sequence[int]) -> list[Tensor]:
        return [part.taken(units) for part in self.parts]

    def shapes(self, units: int) -> list[Shape]:
        return [part.shape(units) for part in self.parts]

    def of_other(self, tensors: Sequence[Tensor], units: Sequence[int], share: Share) -> Cargo:
        """Another rank's, of which only some units have come."""
        total = len(units_of(share, UNIT))
        pairs = zip(self.parts, tensors, strict=True)
        return Cargo(tuple(part.spread(taken, units, total) for part, taken in pairs), share)

    def pieces(self) -> list[tuple[Interval, list[Tensor]]]:
        """Each run of neighbouring keys by itself."""
        found, before = [], 0
        for start, stop in self.share:
            count = -(-stop // UNIT) - start // UNIT
            found.append(((start, stop), [part.piece(before, before + count) for part in self.parts]))
            before += count
        return found


def loaded(
    inputs: Inputs, quantized: Quantized | None, cargo: list[Tensor], length: int
) -> tuple[Inputs, Quantized | None]:
    """A problem whose keys and values, `length` of them, are a piece of cargo."""
    if quantized is None:
        key, value = (x[:, :, :length] for x in cargo)
        return replace(inputs, key=key, value=value), None
    key, value, key_scale = cargo
    quantized = replace(quantized, key=key.contiguous(), value=value.contiguous(), key_scale=fresh(key_scale))
    return without_keys(inputs, length), quantized


def fresh(x: Tensor) -> Tensor:
    """A part of a tensor as kernels expect what stands between the stages: without gaps, and aligned."""
    return x.clone(memory_format=torch.contiguous_format)


def without_keys(inputs: Inputs, length: int) -> Inputs:
    """A problem of as many keys, of which only the number is looked at; they take no memory."""
    key, value = (x.new_zeros(1).expand(*x.shape[:2], length, x.shape[3]) for x in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value)
