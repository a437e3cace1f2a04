"""The "probe" rule: a few rows of each query block are scored exactly against every key they see.

A program takes ROWS sampled rows (ROWS / PROBES query blocks) of one head and walks their keys once, STEP at a time. It
leaves the logarithm of each block's weight in scratch of its own, which stays in L2, and makes shares of it when the
rows' totals are known. Programs stay and take tile after tile, so that the scratch does not grow with the problem.
Scores are those that attention will have: of int8 copies where there are such (INT8), else of bfloat16.
"""

import triton
import triton.language as tl

from sparge import probing
from sparge.backends.triton._prepare import KEYS_PER_SCALE, SEQUENCE_TILE, head_row, sequence, slot_of
from sparge.backends.triton._select import WORD, head_of_part, share_row

LENGTHS = ["heads", "kv_heads", "q_len", "k_len", "q_tokens", "k_tokens", "share_rows", "words", "left",
           "right", "tiles", "all_tiles", "first_head", "heads_here", "k_units"]  # fmt: skip
HIDDEN = tl.constexpr(-0x7FFFFF00)  # below every sum of int8 products

GROUPED_KEYS = tl.constexpr(probing.GROUPED_KEYS)


@triton.jit
def best_of_groups(scores, BLOCKS: tl.constexpr, BK: tl.constexpr):
    """The best score of each of a block's groups of keys, [rows, BLOCKS, groups]: a thread has each to itself."""
    TOGETHER: tl.constexpr = BK if BK < GROUPED_KEYS else GROUPED_KEYS
    UNITS: tl.constexpr = BK // TOGETHER
    best = tl.reshape(scores, [scores.shape[0], BLOCKS * UNITS, TOGETHER // 8, 4, 2])
    return tl.reshape(tl.max(tl.max(best, 4), 2), [scores.shape[0], BLOCKS, UNITS * 4])


@triton.jit
def scores_of_groups(
    q, factor, low, high, K, K_SCALE, VALID, first, k_len, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, HAS_VALID: tl.constexpr,
    INT8: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The best score of each group of keys, to base 2; what is hidden or broken is passed over.

    WHOLE: every row sees all of the keys. Rows and keys are scaled only where they are compared with others'.
    """
    BLOCKS: tl.constexpr = STEP // BK
    n, d = first + tl.arange(0, STEP), tl.arange(0, DP)
    place = K + n.to(tl.int64)[None, :] * k_row + d[:, None] * k_dim
    if WHOLE or INT8:  # copies are padded
        k = tl.load(place) if D == DP else tl.load(place, mask=(d < D)[:, None], other=0.0)
    else:
        k = tl.load(place, mask=(n < k_len)[None, :] & (d < D)[:, None], other=0.0)
    scores = tl.dot(q, k, out_dtype=tl.int32) if INT8 else tl.dot(q, k.to(tl.bfloat16))
    if not WHOLE:
        seen = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
        if HAS_VALID:
            seen = seen & (tl.load(VALID + n, mask=n < k_len, other=0) != 0)[None, :]
        scores = tl.where(seen, scores, HIDDEN if INT8 else float("-inf"))
    best = best_of_groups(scores, BLOCKS, BK)
    scaled = best.to(tl.float32) * factor[:, None, None]
    if INT8:
        group, block = tl.arange(0, best.shape[2]), tl.arange(0, BLOCKS)
        unit = (first + block[:, None] * BK) // KEYS_PER_SCALE + group[None, :] // 4
        scaled *= tl.load(K_SCALE + unit)[None, :, :]
    hidden = best == (HIDDEN if INT8 else float("-inf"))
    return tl.where(hidden | (scaled != scaled), float("-inf"), scaled)


@triton.jit
def probe_keys(
    best, total, q, factor, low, high, K, K_SCALE, VALID, LOGS, first, k_len, width, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, HAS_VALID: tl.constexpr,
    INT8: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Fold STEP keys into the rows' best score and total weight; store the logarithms of their blocks' weights."""
    BLOCKS: tl.constexpr = STEP // BK
    ROWS: tl.constexpr = q.shape[0]
    groups = scores_of_groups(
        q, factor, low, high, K, K_SCALE, VALID, first, k_len, k_row, k_dim, D, DP, BK, STEP, HAS_VALID, INT8, WHOLE
    )
    best_now = tl.maximum(best, tl.max(tl.max(groups, 2), 1))
    shift = tl.where(best_now == float("-inf"), 0.0, best_now)
    weight = tl.sum(tl.exp2(groups - shift[:, None, None]), 2)
    row, block = tl.arange(0, ROWS), first // BK + tl.arange(0, BLOCKS)
    place = LOGS + row[:, None] * width + block[None, :]
    tl.store(place, tl.log2(weight) + shift[:, None], mask=(block < width)[None, :])
    return best_now, total * tl.exp2(best - shift) + tl.sum(weight, 1)


@triton.jit(do_not_specialize=LENGTHS)
def probe(
    Q, K, Q_SCALE, K_SCALE, VALID, UNBROKEN, Q_ENDS, K_ENDS,  # inputs
    LOGS,  # scratch: float32 [programs, ROWS, key blocks, rounded up to whole words]
    SHARES,  # output: float16 [heads from first_head on, share_rows, key blocks, rounded up]; see share_row
    heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, tiles, all_tiles, first_head,
    heads_here, k_units, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PROBES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, HAS_VALID: tl.constexpr, PACKED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    for n in range(tl.program_id(0), all_tiles, tl.num_programs(0)):
        probe_tile(
            Q, K, Q_SCALE, K_SCALE, VALID, UNBROKEN, Q_ENDS, K_ENDS,
            LOGS + tl.program_id(0).to(tl.int64) * ROWS * words * WORD, SHARES,
            n % tiles, head_of_part(n // tiles, heads, first_head, heads_here, PACKED),
            heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, first_head, k_units,
            scale, q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
            D, DP, BQ, BK, PROBES, ROWS, STEP, HAS_VALID, PACKED, INT8,
        )  # fmt: skip


@triton.jit
def probe_tile(
    Q, K, Q_SCALE, K_SCALE, VALID, UNBROKEN, Q_ENDS, K_ENDS, LOGS, SHARES, tile, bh,
    heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, first_head, k_units, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PROBES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, HAS_VALID: tl.constexpr, PACKED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """The shares that ROWS sampled rows of one head give to the key blocks, averaged over each query block."""
    QUERY_BLOCKS: tl.constexpr = ROWS // PROBES
    wide = bh.to(tl.int64)
    batch, head = wide // heads, wide % heads
    first_row, q_len = sequence(Q_ENDS, batch, q_len, q_tokens, PACKED)
    first_key, k_len = sequence(K_ENDS, batch, k_len, k_tokens, PACKED)
    width = words * WORD
    i, d = tl.arange(0, ROWS), tl.arange(0, DP)
    block = tile * QUERY_BLOCKS + i // PROBES
    row = tl.minimum(block * BQ + (i % PROBES + 1) * BQ // PROBES, tl.maximum(q_len, 1)) - 1
    real = block * BQ < q_len
    place = Q + batch * q_batch + head * q_head + (first_row + row).to(tl.int64)[:, None] * q_row
    q = tl.load(place + d[None, :] * q_dim, mask=real[:, None] & (d < D)[None, :], other=0)
    kv_head = head // (heads // kv_heads)
    factor = tl.full([ROWS], 0.0, tl.float32) + scale
    if INT8:
        q_place = head_row(batch, head, heads, PACKED) * q_tokens + first_row
        factor *= tl.load(Q_SCALE + q_place + row, mask=real, other=0.0)
        first_key = slot_of(first_key, batch, SEQUENCE_TILE, PACKED) * SEQUENCE_TILE  # where its copies start
        K_SCALE += head_row(batch, kv_head, kv_heads, PACKED) * k_units + first_key // KEYS_PER_SCALE
    else:
        q = q.to(tl.bfloat16)
    K += batch * k_batch + kv_head * k_head + first_key * k_row
    if HAS_VALID:
        VALID += batch * k_len
    position = row + k_len - q_len
    low = tl.maximum(position - left, 0).to(tl.int32)
    high = tl.where(real, tl.minimum(position + right + 1, k_len), 0).to(tl.int32)

    begin = tl.min(low, 0) // STEP * STEP
    end = tl.max(high, 0)
    seen_by_all = tl.min(tl.where(real, high, k_len), 0)
    if HAS_VALID:
        seen_by_all = tl.minimum(seen_by_all, tl.load(UNBROKEN + batch))
    edge = tl.maximum(tl.where(tl.max(low, 0) == 0, seen_by_all // STEP * STEP, begin), begin)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(begin, edge, STEP):
        best, total = probe_keys(
            best, total, q, factor, low, high, K, K_SCALE, VALID, LOGS, first, k_len, width, k_row, k_dim,
            D, DP, BK, STEP, HAS_VALID, INT8, True,
        )  # fmt: skip
    for first in range(edge, end, STEP):
        best, total = probe_keys(
            best, total, q, factor, low, high, K, K_SCALE, VALID, LOGS, first, k_len, width, k_row, k_dim,
            D, DP, BK, STEP, HAS_VALID, INT8, False,
        )  # fmt: skip
    tl.debug_barrier()  # every thread's logarithms are written before another reads them

    log_total = best + tl.log2(total)
    query_block = tile * QUERY_BLOCKS + tl.arange(0, QUERY_BLOCKS)
    place = SHARES + (share_row(bh, batch, head, first_row, share_rows, first_head, BQ, PACKED) + query_block) * width
    there = (query_block * BQ < q_len)[:, None]
    for word in range(words):
        column = word * WORD + tl.arange(0, WORD)
        walked = (column * BK >= begin) & (column * BK < end)
        logs = tl.load(LOGS + i[:, None] * width + column[None, :], mask=walked[None, :], other=float("-inf"))
        share = tl.exp2(logs - log_total[:, None])
        share = tl.where(share == share, share, 0.0)  # a row that sees nothing, or whose total is NaN
        share = (tl.sum(tl.reshape(share, [QUERY_BLOCKS, PROBES, WORD]), 1) / PROBES).to(tl.float16)
        tl.store(place[:, None] + width + column[None, :], share, mask=there)
        # Nothing stands before the first block: it stands there itself.
        tl.store(place[:, None] + column[None, :], share, mask=there & (query_block == 0)[:, None])
    tl.debug_barrier()  # all have read before the next tile's logarithms come
