"""Checks everything a caller may get wrong, and turns it into one `Inputs`; `restore` undoes the layout."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.packing import Packing
from sparge.visibility import UNBOUNDED, Visibility

LAYOUTS = ("BHSD", "BSHD")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_SCALE = 1e30  # well inside float32

Window = tuple[int | None, int | None]


def _misalignment(x: Tensor | None) -> int | None:
    """Where a copy is needed, the copy is aligned."""
    return None if x is None else x.data_ptr() & 15 if x.is_contiguous() else 0


class Signature(NamedTuple):
    """A problem without its data: two with equal signatures may be computed by the same kernel launches."""

    q_shape: tuple[int, ...]  # [B, Hq, Nq, D]
    k_shape: tuple[int, ...]
    value_dim: int
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misalignments: tuple[int, int, int]  # addresses of query, key and value, modulo 16
    scale: float
    q_len: int  # of the longest sequence
    k_len: int
    left: int
    right: int
    valid: int | None  # address of the key padding, modulo 16
    layout: str
    needs_lse: bool
    packing: tuple[int, torch.dtype, torch.dtype, int, int] | None

    @property
    def has_valid(self) -> bool:
        return self.valid is not None


@dataclass(frozen=True)
class Sample:
    """What smoothing and value scales are taken from, where a problem's keys are part of a longer sequence."""

    key: Tensor  # [B, Hkv, n, D]: the tiles of the whole sequence that `quantization.sampled` takes
    value: Tensor | None  # [B, Hkv, n, Dv]; None where values are not scaled
    valid: Tensor | None  # bool [B, n]; None: every key is valid
    value_max: Tensor | None  # float32 [B, Hkv, Dv]: the largest magnitudes of the whole sequence


@dataclass(frozen=True)
class Inputs:
    """One attention problem. Tensors are views of the caller's, with heads before sequence.

    Packed sequences stand in one batch entry, and q_len and k_len of the visibility are those of the longest.
    """

    query: Tensor  # [B, Hq, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor  # [B, Hkv, Nk, Dv]
    scale: float
    visibility: Visibility
    layout: str
    needs_lse: bool = True
    packing: Packing | None = None
    sample: Sample | None = None  # None: of these keys and values

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @functools.cached_property
    def signature(self) -> Signature:
        """Everything but the data."""
        query, key, value, sight, packing = self.query, self.key, self.value, self.visibility, self.packing
        return Signature(
            query.shape, key.shape, value.shape[-1], query.stride(), key.stride(), value.stride(), query.dtype,
            query.device, (query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15), self.scale,
            sight.q_len, sight.k_len, sight.left, sight.right, _misalignment(sight.key_valid), self.layout,
            self.needs_lse, None if packing is None else packing.signature,
        )  # fmt: skip

    def empty_output(self) -> Tensor:
        """[B, Hq, Nq, Dv], stored so that the caller's layout is contiguous."""
        batch, heads, length, _ = self.query.shape
        dim = self.value.shape[-1]
        if self.layout == "BSHD":
            return self.query.new_empty(batch, length, heads, dim).transpose(1, 2)
        return self.query.new_empty(batch, heads, length, dim)


def prepare_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    layout: str = "BHSD",
    needs_lse: bool = True,
) -> Inputs:
    """Raise one clear sentence for anything unsupported; ignore nothing."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, not {layout!r}.")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p={dropout_p!r} is not supported: sparge is for inference; pass dropout_p=0.0.")
    _check_tensors(query, key, value, rank=4, shape_name="B, H, S, D" if layout == "BHSD" else "B, S, H, D")
    if layout == "BSHD":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"enable_gqa must be True or False, not {enable_gqa!r}.")
    _check_shapes(query, key, value, enable_gqa)
    q_len, k_len = query.shape[2], key.shape[2]
    key_valid = _key_padding(attn_mask, query.shape[0], k_len, query.device)
    return Inputs(
        query=query.detach().resolve_neg(),
        key=key.detach().resolve_neg(),
        value=value.detach().resolve_neg(),
        scale=check_scale(scale, query.shape[-1]),
        visibility=visibility(q_len, k_len, is_causal, window, query.device, key_valid),
        layout=layout,
        needs_lse=needs_lse,
    )


def restore(values: Tensor, layout: str) -> Tensor:
    """Heads-first values back to the caller's layout."""
    return values.transpose(1, 2) if layout == "BSHD" else values


def visibility(
    q_len: int,
    k_len: int,
    is_causal: bool,
    window: Window | None,
    device: torch.device,
    key_valid: Tensor | None = None,
) -> Visibility:
    """Causal order and window together: a key is seen when both allow it."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, not {is_causal!r}.")
    left, right = _window(window)
    if is_causal:
        right = min(right, 0)
    return Visibility(q_len, k_len, device, left, right, key_valid)


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not abs(scale) <= MAX_SCALE:
        raise ValueError(f"scale must be a finite number or None (1 / sqrt(head_dim)), not {scale!r}.")
    return float(scale)


def pack_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    longest: tuple[int, int],
    is_causal: bool,
    scale: float | None,
    window: Window | None,
    needs_lse: bool,
) -> Inputs:
    """A packed batch [tokens, heads, head_dim] as one problem; the sequence ends are not read."""
    _check_tensors(query, key, value, rank=3, shape_name="tokens, H, D")
    query, key, value = (x.detach().resolve_neg()[None].transpose(1, 2) for x in (query, key, value))
    _check_shapes(query, key, value, enable_gqa=True)
    sight = visibility(max(1, longest[0]), max(1, longest[1]), is_causal, window, query.device)
    return Inputs(
        query, key, value, check_scale(scale, query.shape[-1]), sight, "BSHD", needs_lse=needs_lse, packing=packing
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, rank: int, shape_name: str) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} must be an ordinary dense tensor, not {x.layout}: convert it first.")
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions [{shape_name}], not shape {tuple(x.shape)}.")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; sparge takes float16, bfloat16 or float32: convert it first.")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} is {x.dtype} but query is {query.dtype}; give all three the same dtype.")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device} but query is on {query.device}; move them to one device.")
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no data; give it a real one.")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires grad, and sparge has no backward pass: call it under torch.no_grad(), "
                "or use torch.nn.functional.scaled_dot_product_attention for training."
            )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Heads-first shapes must agree with each other."""
    (batch, heads, q_len, dim), (k_batch, kv_heads, k_len, k_dim) = query.shape, key.shape
    v_batch, v_heads, v_len, v_dim = value.shape
    if not batch == k_batch == v_batch:
        raise ValueError(f"query, key and value have batch sizes {batch}, {k_batch} and {v_batch}; they must be equal.")
    if kv_heads != v_heads or k_len != v_len:
        raise ValueError(
            f"key has {kv_heads} heads of {k_len} tokens but value has {v_heads} heads of {v_len}; they must be equal."
        )
    if min(batch, heads, kv_heads, q_len, k_len) < 1:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} (heads first) must have at least one "
            "batch entry, head and token."
        )
    if dim != k_dim:
        raise ValueError(f"query has head_dim {dim} but key has {k_dim}; they must be equal (value's may differ).")
    for name, size in (("query", dim), ("value", v_dim)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {size}; sparge takes {MIN_HEAD_DIM} to {MAX_HEAD_DIM}.")
    if heads % kv_heads:
        raise ValueError(f"query's {heads} heads are not a multiple of key's {kv_heads}.")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key has {kv_heads}: pass enable_gqa=True for grouped queries.")


def _key_padding(attn_mask: Tensor | None, batch: int, k_len: int, device: torch.device) -> Tensor | None:
    """A boolean mask that hides whole keys, as [B, Nk]."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor, not {type(attn_mask).__name__}.")
    if attn_mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask has dtype {attn_mask.dtype}; sparge takes boolean key-padding masks (True = attend): "
            "use is_causal or window for structure, or torch's own attention for additive biases."
        )
    if attn_mask.device != device:
        raise ValueError(f"attn_mask is on {attn_mask.device} but query is on {device}; move it there.")
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:3] != (1, 1) or shape[3] != k_len:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; sparge takes key-padding masks [B, 1, 1, {k_len}] "
            "(from [B, S]: mask[:, None, None, :]): use is_causal, window or block_sparse_attention for masks that "
            "differ between queries or heads."
        )
    return attn_mask.reshape(shape[0], k_len).expand(batch, k_len)


def _window(window: Window | None) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(map(_is_side, sides)):
        raise ValueError(
            f"window must be (left, right), each a number of keys, or None (or -1) for no limit, not {window!r}."
        )
    left, right = (UNBOUNDED if side in (None, -1) else min(int(side), UNBOUNDED) for side in sides)
    return left, right


def _is_side(side: object) -> bool:
    return side is None or (isinstance(side, numbers.Integral) and not isinstance(side, bool) and int(side) >= -1)
