"""The oracle: the whole algorithm in plain torch, float32 inside, written to be read.

Every backend method has its twin here (`summarize`, `select`, `attend`), and every backend is tested against it.
`attend` walks the attention matrix block by block, as a kernel does, so that the second stage and the quantised
numerics mean the same everywhere; it computes every block and discards what is not kept, so it saves no time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparge import quantization as fmt
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.probing import (
    SHARE_DTYPE,
    best_of_groups,
    keys_to_probe,
    probe_positions,
    probe_scores,
    probe_shares,
    rows_to_probe,
    share_asked,
    with_blocks_before,
)
from sparge.quantization import Quantized
from sparge.selection import apply_rules, claimed_by_share
from sparge.stages import Blocks, Output

GROUP = 64  # query rows that share one second-stage decision, on every backend
SCORES_AT_ONCE = 1 << 18  # bounds the memory of selection
PROBED_AT_ONCE = 1 << 19  # and of the probe: few rows at a time would read the keys too often
ROWS_AT_ONCE = 1 << 12  # bounds the memory of summaries: token rows of all heads


# ---- dense attention, the yardstick


def dense(inputs: Inputs, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Exact attention over the visible pairs, and its LSE. Rows that see no key give 0 and -inf."""
    q, k, v = (
        x.to(dtype) for x in (inputs.query, _per_query_head(inputs.key, inputs), _per_query_head(inputs.value, inputs))
    )
    seen = inputs.visibility.pairs(range(q.shape[2]), range(k.shape[2]))
    scores = torch.where(seen, q @ k.transpose(-1, -2) * inputs.scale, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    sees_something = seen.any(-1)
    values = torch.where(sees_something[..., None], multiply_visible(weights, seen, v), 0.0)
    return values, torch.where(sees_something, lse, -torch.inf)


def multiply_visible(weights: Tensor, seen: Tensor, value: Tensor) -> Tensor:
    """weights @ value, where a NaN or infinite value touches only the rows that see its key."""
    broken = ~torch.isfinite(value).all(-1)
    if not broken.any():
        return weights @ value
    whole = weights @ torch.where(broken[..., None], 0.0, value)
    for key in broken.reshape(-1, broken.shape[-1]).any(0).nonzero()[:, 0].tolist():
        touched = seen[..., :, key, None] & broken[..., None, key, None]
        whole = whole + torch.where(touched, weights[..., :, key, None] * value[..., None, key, :], 0.0)
    return whole


def _per_query_head(x: Tensor, inputs: Inputs) -> Tensor:
    """Key/value heads repeated for the query heads that share them."""
    return x.repeat_interleave(inputs.group_size, 1)


# ---- stage 1a: block means, self-similarity, quantised copies


def summarize(inputs: Inputs, config: SparseConfig) -> Blocks:
    (rows, keys), (a, b) = config.block, config.subblocks
    valid = inputs.visibility.key_valid
    q_sums, q_counts = _segment_sums(inputs.query, rows // a)
    k_sums, k_counts = _segment_sums(inputs.key, keys // b, valid)
    v_sums, _ = _segment_sums(inputs.value, keys, valid)

    k_sums, k_counts = _whole_blocks(k_sums, b), _whole_blocks(k_counts, b)  # [B, Hkv, key blocks, b, D]
    sample = inputs.sample
    key_mean = fmt.sampled_mean(inputs.key, valid) if sample is None else fmt.sampled_mean(sample.key, sample.valid)
    q_means = _whole_blocks(q_sums, a) / _whole_blocks(q_counts, a).clamp(min=1)
    k_means = k_sums / k_counts.clamp(min=1) - key_mean[:, :, None, None]
    k_means = torch.where(k_means.isfinite(), k_means, torch.nan)  # rows that see it cannot judge, and keep everything
    k_means = torch.where(k_counts > 0, k_means, 0.0)

    judged = config.similarity is not None
    return Blocks(
        inputs=inputs,
        q_means=q_means.bfloat16(),
        k_means=k_means.bfloat16().transpose(2, 3).contiguous(),
        v_finite=torch.isfinite(v_sums.sum(-1)),
        q_similarity=self_similarity(inputs.query, rows) if judged else None,
        k_similarity=self_similarity(inputs.key, keys, key_mean, valid) if judged else None,
        quantized=None if config.quantization == "none" else _quantize(inputs, key_mean, config.quantization),
        block=config.block,
    )


def _segment_sums(
    x: Tensor, size: int, valid: Tensor | None = None, mean: Tensor | None = None, unit_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """float32 sums over segments of `size` tokens [B, H, segments, D], and how many tokens each holds.

    Of the valid rows only, minus `mean`, scaled to length one if asked. A few thousand tokens at a time, so that no
    float32 copy of the whole tensor is held.
    """
    length = x.shape[2]
    step = max(1, ROWS_AT_ONCE // (x.shape[0] * x.shape[1] * size)) * size
    sums = []
    for start in range(0, length, step):
        rows = x[:, :, start : start + step].float()
        if mean is not None:
            rows = rows - mean[:, :, None]
        if valid is not None:  # hidden keys may hold anything, NaN included
            rows = torch.where(valid[:, None, start : start + step, None], rows, 0.0)
        if unit_rows:
            norm = rows.norm(dim=-1, keepdim=True)
            rows = torch.where(norm > 0, rows / norm, rows)
        sums.append(_sum_segments(rows, size))
    if valid is not None:
        return torch.cat(sums, 2), _sum_segments(valid[:, None, :, None].float(), size)
    counts = torch.full((1, 1, -(-length // size), 1), float(size), dtype=torch.float32, device=x.device)
    if length % size:
        counts[:, :, -1] = length % size
    return torch.cat(sums, 2), counts


def _sum_segments(rows: Tensor, size: int) -> Tensor:
    whole = rows.shape[2] // size
    sums: Tensor = rows[:, :, : whole * size].unflatten(2, (whole, size)).sum(3)
    if whole * size < rows.shape[2]:
        sums = torch.cat((sums, rows[:, :, whole * size :].sum(2, keepdim=True)), 2)
    return sums


def _whole_blocks(segments: Tensor, per_block: int) -> Tensor:
    """[B, H, segments, D] to [B, H, blocks, per_block, D], zeros where the last block has fewer segments."""
    missing = -segments.shape[2] % per_block
    whole: Tensor = torch.nn.functional.pad(segments, (0, 0, 0, missing)).unflatten(2, (-1, per_block))
    return whole


def self_similarity(x: Tensor, size: int, mean: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Mean cosine similarity of all pairs of rows in each block, float32 [B, H, blocks].

    It is the squared norm of the mean normalised row, so no Gram matrix is needed. Zero rows stay zero.
    """
    sums, counts = _segment_sums(x, size, valid, mean, unit_rows=True)
    return (sums / counts.clamp(min=1)).square().sum(-1)


def _quantize(inputs: Inputs, key_mean: Tensor, mode: str) -> Quantized:
    smoothed, value, valid = inputs.key.float() - key_mean[:, :, None], inputs.value, inputs.visibility.key_valid
    if valid is not None:
        smoothed, value = (torch.where(valid[:, None, :, None], x, 0.0) for x in (smoothed, value))
    query, query_scale = fmt.quantize_queries(inputs.query)
    key, key_scale = fmt.quantize_keys(smoothed)
    value_scale = value_mean = None
    if mode == "int8-fp8":
        value, value_scale, value_mean = fmt.quantize_values(value, valid, _common_scale_and_mean(inputs))
    else:
        value = value.to(fmt.sixteen_bit(value.dtype))
    return Quantized(query, query_scale, key, key_scale, key_mean, value, value_scale, value_mean)


def _common_scale_and_mean(inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """Of the values of the longer sequence that these are part of."""
    sample = inputs.sample
    if sample is None or sample.value is None or sample.value_max is None:
        return None
    scale, mean = fmt.value_scale_and_mean(sample.value, sample.valid)
    return fmt.widened(scale, sample.value_max + mean.abs()), mean


# ---- stage 1b: predicted scores, rules, always-kept blocks


def select(blocks: Blocks, config: SparseConfig) -> BlockMask:
    sight = blocks.inputs.visibility
    everything = BlockMask.all_visible(sight, config.block, *blocks.inputs.query.shape[:2])
    if config.keeps_everything:
        return everything
    if "probe" in config.rule and blocks.probed is None:
        blocks = replace(blocks, probed=probe(blocks, config))
    keep = _predicted(blocks, config) | _always_kept(blocks, config)
    return everything & BlockMask.from_dense(keep, sight.q_len, sight.k_len, config.block, sight)


def _predicted(blocks: Blocks, config: SparseConfig) -> Tensor:
    batch, heads, q_blocks, a, _ = blocks.q_means.shape
    per_block = batch * heads * a * blocks.k_means.shape[2] * blocks.k_means.shape[3]
    step = max(1, SCORES_AT_ONCE // per_block)
    parts = [_claims(blocks, config, first, first + step) for first in range(0, q_blocks, step)]
    return torch.cat(parts, 2)


def _claims(blocks: Blocks, config: SparseConfig, first: int, last: int) -> Tensor:
    """The rules' verdict on query blocks first ... last, bool [B, Hq, query blocks, key blocks]."""
    (rows, keys), (a, _) = config.block, config.subblocks
    seen = blocks.inputs.visibility.blocks(rows // a, keys, first * a, last * a)  # per sub-row
    missing = -seen.shape[2] % a
    seen = torch.nn.functional.pad(seen, (0, 0, 0, missing)).unflatten(2, (-1, a))
    judged = seen
    if blocks.k_similarity is not None:
        theta = config.per_head("similarity", blocks.q_means.shape[1], seen.device)[:, None]
        similar = _per_query_head(blocks.k_similarity, blocks.inputs) >= theta
        judged = seen & similar[:, :, None, None]
    scores = block_scores(blocks, first, last)
    claimed = apply_rules(scores, judged, seen.sum(-1, keepdim=True), config)
    if blocks.probed is not None and "probe" in config.rule:
        asked = share_asked(config, scores.shape[1], blocks.inputs.visibility)
        claimed |= claimed_by_share(scores, judged, with_blocks_before(blocks.probed[:, :, first : last + 1]), asked)
    return claimed


def block_scores(blocks: Blocks, first: int, last: int) -> Tensor:
    """Predicted logits of each sub-row for each key block, float32 [B, Hq, query blocks, a, key blocks].

    One block's score is the log of the mean exponential over its sub-blocks that hold a key.
    """
    query = blocks.q_means[:, :, first:last].float()
    batch, heads, q_blocks, a, dim = query.shape
    key = blocks.k_means.float()
    kv_heads, _, k_blocks = key.shape[1:4]
    query = query.reshape(batch, kv_heads, 1, -1, dim)
    scores = query @ key.transpose(-1, -2) * blocks.inputs.scale  # [B, Hkv, b, rows, key blocks]
    filled = blocks.k_filled[:, None, :, None]
    scores = torch.where(filled, scores, -torch.inf)
    pooled = torch.logsumexp(scores, 2) - filled.sum(2).clamp(min=1).log()
    return pooled.reshape(batch, heads, q_blocks, a, k_blocks)


def probe(blocks: Blocks, config: SparseConfig) -> Tensor:
    """What a few rows of each query block attend to: `Blocks.probed`."""
    inputs = blocks.inputs
    batch, heads, q_len, _ = inputs.query.shape
    k_len = inputs.key.shape[2]
    rows = probe_positions(q_len, config.block[0], config.probe_rows, inputs.key.device)
    shape = (batch, heads, 1 + len(rows), -(-k_len // config.block[1]))
    probed = torch.zeros(shape, dtype=SHARE_DTYPE, device=inputs.key.device)
    for head in range(inputs.key.shape[1]):  # one after the other: the more rows a product has, the faster it is
        group = slice(head * inputs.group_size, (head + 1) * inputs.group_size)
        _probe_head(blocks, config, rows, slice(head, head + 1), group, probed[:, group])
    probed[:, :, 0] = probed[:, :, 1]  # nothing stands before the first block
    return probed


def _probe_head(
    blocks: Blocks, config: SparseConfig, rows: Tensor, key_head: slice, group: slice, probed: Tensor
) -> None:
    """Fills what the query heads of one key head attend to."""
    sight, (block_rows, block_keys) = blocks.inputs.visibility, config.block
    q_len, k_len = blocks.inputs.query.shape[2], blocks.inputs.key.shape[2]
    key, key_scale = keys_to_probe(blocks, slice(0, k_len), key_head)
    key = key.float()
    step = max(1, PROBED_AT_ONCE // (probed.shape[0] * probed.shape[1] * config.probe_rows * k_len))
    for first in range(0, len(rows), step):
        top, bottom = first * block_rows, min((first + step) * block_rows, q_len) - 1
        stop = min(k_len, bottom + sight.offset + sight.right + 1)
        if stop <= 0:
            continue  # no row sees any key
        some, free = rows[first : first + step].flatten(), min(stop, sight.keys_seen_from(top, bottom))
        seen = (key[:, :, :stop], None if key_scale is None else key_scale[:, :, :stop])
        scores = probe_scores(
            rows_to_probe(blocks, some, group), seen, blocks.inputs.scale, sight, some, range(stop), free
        )
        best = best_of_groups(scores, block_keys)
        part = probe_shares(best.flatten(-2).softmax(-1).view_as(best), config)
        probed[:, :, 1 + first : 1 + first + step, : part.shape[3]] = part


def _always_kept(blocks: Blocks, config: SparseConfig) -> Tensor:
    """Diagonal or right edge, sinks, protected tokens, blocks that may not be judged, values that are not finite."""
    inputs, (rows, keys) = blocks.inputs, config.block
    sight = inputs.visibility
    batch, heads, q_blocks = blocks.q_means.shape[:3]
    k_blocks = blocks.k_means.shape[3]
    keep = ~_per_query_head(blocks.v_finite, inputs)[:, :, None].expand(batch, heads, q_blocks, k_blocks)
    keep[..., : config.sinks] = True
    if sight.right_bounded:
        keep |= sight.right_edge(rows, keys)
    for start, stop in config.protected_ranges(sight.k_len):
        if start < stop:
            keep[..., start // keys : -(-stop // keys)] = True
        top, bottom = max(0, start - sight.offset), min(sight.q_len, stop - sight.offset)
        if top < bottom:
            keep[:, :, top // rows : -(-bottom // rows)] = True
    if blocks.q_similarity is not None and blocks.k_similarity is not None:
        theta = config.per_head("similarity", heads, keep.device)[:, None]
        keep |= ~(blocks.q_similarity >= theta)[..., None]
        keep |= ~(_per_query_head(blocks.k_similarity, inputs) >= theta)[:, :, None]
    return keep


# ---- stage 2: attention over the kept blocks


def attend(blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
    inputs = blocks.inputs
    batch, heads, q_len, _ = inputs.query.shape
    kept = mask.to_dense().expand(batch, heads, -1, -1)
    v_finite = _per_query_head(blocks.v_finite, inputs)
    values = torch.empty(batch, heads, q_len, inputs.value.shape[-1], dtype=torch.float32, device=kept.device)
    lse = torch.empty(batch, heads, q_len, dtype=torch.float32, device=kept.device)
    skipped = torch.zeros(batch, heads, dtype=torch.int64, device=kept.device)
    for i in range(mask.q_blocks):
        rows = range(i * mask.block[0], min((i + 1) * mask.block[0], q_len))
        state = RowState(blocks, rows, config)
        for j in reversed(range(mask.k_blocks)):  # descending: the diagonal first, where scores are high
            keys = range(j * mask.block[1], min((j + 1) * mask.block[1], inputs.key.shape[2]))
            state.fold(keys, kept[:, :, i, j], v_finite[:, :, j])
        values[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop] = state.finish()
        skipped += state.skipped
    output = inputs.empty_output()
    return Output(output.copy_(values), lse, skipped)


class RowState:
    """The online softmax of one block of query rows: running maximum, sum and weighted values."""

    def __init__(self, blocks: Blocks, rows: range, config: SparseConfig) -> None:
        self.blocks, self.inputs, self.rows = blocks, blocks.inputs, rows
        batch, heads = self.inputs.query.shape[:2]
        device = self.inputs.query.device
        shape, dtype = (batch, heads, len(rows)), torch.float32
        self.maximum = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self.sum = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, self.inputs.value.shape[-1], dtype=dtype, device=device)
        self.saw = torch.zeros(batch, heads, len(rows), dtype=torch.bool, device=device)
        self.skipped = torch.zeros(batch, heads, dtype=torch.int64, device=device)
        self.pv_threshold = None if config.pv_threshold is None else config.per_head("pv_threshold", heads, device)

    def fold(self, keys: range, kept: Tensor, v_finite: Tensor) -> None:
        """Add one key block for the (batch, head) pairs that keep it."""
        if not kept.any():
            return
        seen = self.inputs.visibility.pairs(self.rows, keys) & kept[..., None, None]
        scores = torch.where(seen, self._scores(keys), -torch.inf)
        local = scores.amax(-1)
        maximum = torch.maximum(self.maximum, local)
        if self.pv_threshold is not None:
            wanted = self._second_stage(seen.any(-1), local, maximum, v_finite)
            seen = seen & wanted[..., None]
        shift = torch.where(maximum == -torch.inf, 0.0, maximum)
        weights = torch.where(seen, torch.exp(scores - shift[..., None]), 0.0)
        alpha = torch.exp(self.maximum - shift)
        self.sum = self.sum * alpha + weights.sum(-1)
        self.values = self.values * alpha[..., None] + self._weighted_values(weights, seen, keys)
        self.maximum = maximum
        self.saw |= seen.any(-1)

    def _scores(self, keys: range) -> Tensor:
        rows, inputs, quantized = self.rows, self.inputs, self.blocks.quantized
        if quantized is None:
            key = _per_query_head(inputs.key[:, :, keys.start : keys.stop], inputs).float()
            return inputs.query[:, :, rows.start : rows.stop].float() @ key.transpose(-1, -2) * inputs.scale
        query = quantized.query[:, :, rows.start : rows.stop].float()
        key = _per_query_head(quantized.key[:, :, keys.start : keys.stop], inputs).float()
        groups = torch.arange(keys.start, keys.stop, device=key.device) // fmt.KEYS_PER_SCALE
        key_scale = _per_query_head(quantized.key_scale[:, :, groups], inputs)
        row_scale = quantized.query_scale[:, :, rows.start : rows.stop] * inputs.scale
        return query @ key.transpose(-1, -2) * row_scale[..., None] * key_scale[:, :, None]

    def _second_stage(self, seen: Tensor, local: Tensor, maximum: Tensor, v_finite: Tensor) -> Tensor:
        """bool [B, H, rows]: rows whose 64-row group still wants this block. What is not finite is always wanted."""
        assert self.pv_threshold is not None
        drop = torch.where(seen, local - maximum, -torch.inf)
        below = (drop < self.pv_threshold[:, None]) | ~seen
        wanted, counted = [], []
        for start in range(0, len(self.rows), GROUP):
            part = slice(start, start + GROUP)
            skip = below[..., part].all(-1) & v_finite
            wanted.append(~skip[..., None].expand_as(below[..., part]))
            counted.append(skip & seen[..., part].any(-1))
        self.skipped += torch.stack(counted).sum(0)
        return torch.cat(wanted, -1)

    def _weighted_values(self, weights: Tensor, seen: Tensor, keys: range) -> Tensor:
        quantized = self.blocks.quantized
        source = self.inputs.value if quantized is None else quantized.value
        value = _per_query_head(source[:, :, keys.start : keys.stop].float(), self.inputs)
        if quantized is None:
            return multiply_visible(weights, seen, value)
        if quantized.value_scale is None:
            return multiply_visible(weights.to(quantized.value.dtype).float(), seen, value)
        rounded = (weights * fmt.P_SCALE).to(torch.float8_e4m3fn).float()
        scale = _per_query_head(quantized.value_scale, self.inputs)[:, :, None] / fmt.P_SCALE
        return rounded @ value * scale

    def finish(self) -> tuple[Tensor, Tensor]:
        """Normalised values and LSE. A row that saw nothing gives 0 and -inf; one that saw only -inf scores, NaN."""
        values = self.values / self.sum[..., None]
        if self.blocks.quantized is not None and self.blocks.quantized.value_mean is not None:
            values = values + _per_query_head(self.blocks.quantized.value_mean, self.inputs)[:, :, None]
        values = torch.where(self.saw[..., None], values, 0.0)
        lse = torch.where(self.saw, self.maximum + self.sum.log(), -torch.inf)
        if self.blocks.quantized is not None:
            query = self.inputs.query[:, :, self.rows.start : self.rows.stop].float()
            mean = _per_query_head(self.blocks.quantized.key_mean, self.inputs)[..., None]
            shift = (query @ mean)[..., 0] * self.inputs.scale
            lse = torch.where(self.saw, lse + shift, lse)
        return values, lse
