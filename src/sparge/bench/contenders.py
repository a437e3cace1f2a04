"""The other attentions a case is measured against. One that is not there, or fails, says why."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from sparge.bench.problems import Problem
from sparge.block_mask import BlockMask

Action = Callable[[], Tensor]
LOOSE = 0.02  # relative L1 that 16 bits stay well below
LOOSE_8_BIT = 0.1


@dataclass(frozen=True)
class Contender:
    """`build` makes the call that is timed; `missing` says why it cannot be made on a device."""

    name: str
    about: str
    build: Callable[[Problem], Action]
    missing: Callable[[torch.device], str | None]
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around the calls, outside their time
    follows_mask: bool = False  # or computes dense attention
    max_relative_l1: float = LOOSE


def _needs_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs an NVIDIA GPU"


def _never_missing(device: torch.device) -> str | None:
    return None


def _sdpa(problem: Problem) -> Action:
    query, key, value = problem.tensors
    return partial(
        scaled_dot_product_attention, query, key, value,
        is_causal=problem.case.causal, scale=problem.inputs.scale, enable_gqa=problem.case.group > 1,
    )  # fmt: skip


@dataclass(frozen=True)
class Noted:
    """A call, and what was done for it outside its time."""

    call: Action
    note: str

    def __call__(self) -> Tensor:
        return self.call()


def _cudnn(problem: Problem) -> Action:
    """Where torch refuses grouped heads to cuDNN, it gets K and V repeated beforehand, at no cost to it."""
    grouped = _sdpa(problem)
    if problem.case.group == 1:
        return grouped
    try:
        grouped()
    except RuntimeError:
        query, *few = problem.tensors
        key, value = (x.repeat_interleave(problem.case.group, 1) for x in few)
        call = partial(
            scaled_dot_product_attention, query, key, value, is_causal=problem.case.causal, scale=problem.inputs.scale
        )
        return Noted(call, "K and V repeated for grouped heads, not timed")
    return grouped


def _at_or_before(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def flex_mask(mask: BlockMask, causal: bool) -> FlexBlockMask:
    """The same blocks; under causal order only those that the diagonal crosses are masked inside."""
    kept, (rows, keys) = mask.to_dense(), mask.block
    first_row = torch.arange(mask.q_blocks, device=kept.device)[:, None] * rows
    last_key = torch.arange(1, mask.k_blocks + 1, device=kept.device) * keys - 1
    crossed = kept & (last_key > first_row) if causal else torch.zeros_like(kept)

    def lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)

    return FlexBlockMask.from_kv_blocks(
        *lists(crossed),
        *lists(kept & ~crossed),
        BLOCK_SIZE=mask.block,
        mask_mod=_at_or_before if causal else None,
        seq_lengths=(mask.q_len, mask.k_len),
    )


def _flex(problem: Problem) -> Action:
    """Compiled for each case alone: after a few shapes torch would stop compiling and build the whole matrix.

    Autotuning does FlexAttention justice, and skips the tiles that the mask's blocks do not divide into.
    """
    query, key, value = problem.tensors
    mask = flex_mask(problem.mask, problem.case.causal)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs")
    call = partial(
        compiled, query, key, value,
        block_mask=mask, scale=problem.inputs.scale, enable_gqa=problem.case.group > 1,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):  # the autotuner's tables
        call()
    return call


def _sage_missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("sageattention") is None:
        return "sageattention is not installed"
    return _needs_gpu(device)


def _sage(problem: Problem) -> Action:
    from sageattention import sageattn

    return partial(
        sageattn, *problem.tensors,
        tensor_layout="HND", is_causal=problem.case.causal, sm_scale=problem.inputs.scale,
    )  # fmt: skip


CONTENDERS = (
    Contender("cudnn", "cuDNN", _cudnn, _needs_gpu, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
    Contender("flash", "FlashAttention 2", _sdpa, _needs_gpu, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    Contender("sdpa", "torch SDPA", _sdpa, _never_missing),
    Contender("flex", "FlexAttention", _flex, _needs_gpu, follows_mask=True),
    Contender("sage", "SageAttention", _sage, _sage_missing, max_relative_l1=LOOSE_8_BIT),
)


def base_name(device: torch.device) -> str:
    """The contender whose time every ratio is taken from."""
    return "cudnn" if device.type == "cuda" else "sdpa"
