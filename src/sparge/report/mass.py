"""Where the attention of a call truly lies: exact probabilities summed by block, and small pictures of them."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparge.inputs import Inputs

INVISIBLE = 255  # the byte of a patch that no row can see
FULL = 254  # the byte of a patch that is kept as a whole
FAINTEST = 1e-6  # share of a row's attention that is still told from nothing
LARGEST_SIDE = 64  # patches along a picture's side
SMALLEST_SIDE = 12
PICTURE_BYTES = 4_000_000  # of all pictures of a page together


@dataclass(frozen=True)
class Exact:
    """Attention without any approximation, in float32."""

    values: Tensor  # [B, Hq, Nq, Dv]
    mass: Tensor  # [B, Hq, query blocks, key blocks]: probability summed over the rows and keys of a block


def exact_attention(inputs: Inputs, block: tuple[int, int]) -> Exact:
    """One block of rows and one KV head at a time: a matrix of every pair is never there."""
    rows, keys = block
    batch, heads, q_len, _ = inputs.query.shape
    kv_heads, k_len = inputs.key.shape[1:3]
    values = inputs.query.new_zeros(batch, heads, q_len, inputs.value.shape[-1], dtype=torch.float32)
    mass = torch.zeros(batch, heads, -(-q_len // rows), -(-k_len // keys), device=values.device)
    group = heads // kv_heads
    for first in range(0, q_len, rows):
        last = min(first + rows, q_len)
        seen = inputs.visibility.pairs(range(first, last), range(k_len))
        for kv_head in range(kv_heads):
            mine = slice(kv_head * group, (kv_head + 1) * group)
            key, value = (x[:, kv_head, None].float() for x in (inputs.key, inputs.value))
            scores = inputs.scale * (inputs.query[:, mine, first:last].float() @ key.transpose(-1, -2))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
            values[:, mine, first:last] = weights @ value
            columns = pad(weights.sum(-2), (0, mass.shape[-1] * keys - k_len))
            mass[:, mine, first // rows] = columns.unflatten(-1, (-1, keys)).sum(-1)
    return Exact(values, mass)


def picture_side(heads: int) -> int:
    """Patches along the longer side, so that the pictures of all heads stay small together."""
    encoded = 2 * 4 / 3  # two bytes a patch, in base 64
    return max(SMALLEST_SIDE, min(LARGEST_SIDE, math.isqrt(int(PICTURE_BYTES / encoded / max(1, heads)))))


def picture(kept: Tensor, visible: Tensor, mass: Tensor, side: int) -> dict[str, object]:
    """One head as patches of blocks: for each the share kept and, on a scale of logarithms, the mass of a row.

    kept, visible, mass  [query blocks, key blocks]
    """
    factors = [-(-length // side) for length in kept.shape]
    shown, seen, weight = (_patches(x.float(), factors) for x in (kept & visible, visible, mass))
    per_row = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
    shares = torch.where(seen > 0, (FULL * shown / seen.clamp(min=1)).round(), torch.tensor(float(INVISIBLE)))
    decades = -math.log10(FAINTEST)
    depth = (1 + per_row.clamp(min=FAINTEST).log10() / decades).clamp(0, 1)
    depths = torch.where(per_row < FAINTEST, 0.0, 1 + (254 * depth).round())
    data = torch.stack([shares, depths]).to(torch.uint8).flatten().tolist()
    return {"rows": shown.shape[0], "columns": shown.shape[1], "data": base64.b64encode(bytes(data)).decode()}


def _patches(x: Tensor, factors: list[int]) -> Tensor:
    rows, columns = factors
    whole: Tensor = pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    summed: Tensor = whole.unflatten(1, (-1, columns)).sum(-1).unflatten(0, (-1, rows)).sum(1)
    return summed.cpu()
