"""Dense attention of some rows, to compare with: one part of the keys after the other where a mask would be large."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge.inputs import Inputs
from sparge.merging import merge
from sparge.visibility import Visibility

PAIRS_AT_ONCE = 1 << 26  # of rows and keys in one mask: a byte each, and as much again as a number of the inputs' type
SCORES_AT_ONCE = 1 << 24  # in float32, where no fused kernel tells the LSE
ALIGNED = 16  # bytes that addresses must be a multiple of for the fused kernel; also the elements of a row of its mask

Part = tuple[Tensor, Tensor]  # values and LSE, float32


def exact_rows(inputs: Inputs, rows: Tensor) -> Tensor:
    """[B, Hq, R, Dv]: dense attention of rows [R], in the inputs' dtype."""
    group, sight = inputs.group_size, inputs.visibility
    query, everything = inputs.query[:, :, rows], range(sight.k_len)
    if sight.key_valid is None and sight.left >= sight.k_len and sight.right >= sight.k_len:
        out = scaled_dot_product_attention(_folded(query, group), inputs.key, inputs.value, scale=inputs.scale)
    elif _pairs_per_key(query, sight, group) * sight.k_len <= PAIRS_AT_ONCE:
        seen = sight.pairs(rows, everything).repeat(1, 1, group, 1)
        key, value = _cleared(inputs.key, sight, everything), _cleared(inputs.value, sight, everything)
        out = scaled_dot_product_attention(_folded(query, group), key, value, seen, scale=inputs.scale)
        out = torch.where(seen.any(-1, keepdim=True), out, 0.0)
    else:
        out = attend_keys(query, inputs.key, inputs.value, inputs.scale, sight, rows, everything)[0].to(query.dtype)
    return out.reshape(*query.shape[:3], -1)


def attend_keys(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Visibility, rows: Tensor, keys: range
) -> Part:
    """float32 [B, Hq, R, Dv] and [B, Hq, R]: rows [R] of `sight` over the keys of it that key and value hold."""
    group, fused = query.shape[1] // key.shape[1], _is_fused(query, key, value)
    folded = _folded(query, group)
    per_key = _pairs_per_key(query, sight, group) if fused else query.shape[:3].numel()
    step = max(1, (PAIRS_AT_ONCE if fused else SCORES_AT_ONCE) // max(1, per_key) // ALIGNED) * ALIGNED
    attend = _attend_fused if fused else _attend_plainly
    found: Part | None = None
    for first in range(0, len(keys), step):
        some = slice(first, min(first + step, len(keys)))
        seen = sight.pairs(rows, keys[some]).repeat(1, 1, group, 1)
        k, v = (_cleared(x[:, :, some], sight, keys[some]) for x in (key, value))
        part = attend(folded, k, v, seen, scale)
        found = part if found is None else merge(*found, *part)
    assert found is not None
    return found[0].reshape(*query.shape[:3], -1), found[1].reshape(query.shape[:3])


def _cleared(x: Tensor, sight: Visibility, keys: range) -> Tensor:
    """Padding may hold anything, and 0 times NaN is NaN."""
    if sight.key_valid is None:
        return x
    return torch.where(sight.key_valid[:, None, keys.start : keys.stop, None], x, 0.0)


def _folded(query: Tensor, group: int) -> Tensor:
    """Heads of a group share their keys: as more rows of one head they need no copies."""
    batch, heads, rows, dim = query.shape
    return query.reshape(batch, heads // group, group * rows, dim)


def _pairs_per_key(query: Tensor, sight: Visibility, group: int) -> int:
    return (1 if sight.key_valid is None else len(query)) * group * query.shape[2]


def _is_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's memory-efficient kernel takes the tensors."""
    if query.device.type != "cuda":
        return False
    elements = ALIGNED // query.element_size()
    return all(
        x.shape[-1] % elements == 0
        and x.stride(-1) == 1
        and all(stride % elements == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % ALIGNED == 0
        for x in (query, key, value)
    )


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Part:
    rows, keys = seen.shape[-2:]
    bias = query.new_zeros(*seen.shape[:-1], -(-keys // ALIGNED) * ALIGNED)[..., :keys].masked_fill_(~seen, -torch.inf)
    values, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias.expand(*query.shape[:2], rows, keys), True, scale=scale
    )
    sees = seen.any(-1)
    return torch.where(sees[..., None], values, 0.0).float(), torch.where(sees, lse[..., :rows], -torch.inf)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Part:
    scores = (query.float() @ key.float().mT).mul_(scale).masked_fill_(~seen, -torch.inf)
    lse, sees = scores.logsumexp(-1), seen.any(-1)
    values = scores.sub_(lse[..., None]).exp_() @ value.float()
    return torch.where(sees[..., None], values, 0.0), torch.where(sees, lse, -torch.inf)
