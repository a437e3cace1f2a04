"""What kernels are given besides the problem's own tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.inputs import Inputs


@functools.cache
def no_skips(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


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


def pieces(like: Tensor, dtype: torch.dtype, *lengths: int) -> Sequence[Tensor]:
    """Uninitialised scratch in one allocation; each piece begins aligned."""
    rounded = [-(-n // 64) * 64 for n in lengths]
    return torch.split_with_sizes(like.new_empty(sum(rounded), dtype=dtype), rounded)


def sequence_ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Sequence ends of queries and keys."""
    packing = inputs.packing
    return (inputs.query, inputs.key) if packing is None else (packing.q_ends, packing.k_ends)
