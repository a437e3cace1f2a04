"""The "probe" rule: a few rows of each query block are scored exactly against every key they see.

A program takes ROWS sampled rows (ROWS / PROBES query blocks) of one head and walks their keys once, STEP at a time. It
leaves the logarithm of each block's weight in scratch of its own, which stays in L2, and makes shares of it when the
rows' totals are known. Programs stay and take tile after tile, so that the scratch does not grow with the problem.
"""

import triton
import triton.language as tl

from sparge.backends.triton._prepare import sequence
from sparge.backends.triton._select import WORD, head_of_part, share_row

LENGTHS = ["heads", "kv_heads", "q_len", "k_len", "q_tokens", "k_tokens", "share_rows", "words", "left",
           "right", "tiles", "all_tiles", "first_head", "heads_here"]  # fmt: skip


@triton.jit
def probe_keys(
    best, total, q, low, high, K, VALID, LOGS, first, k_len, width, k_row, k_dim, scale,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, HAS_VALID: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Fold STEP keys into the rows' best score and total weight; store the logarithms of their blocks' weights.

    WHOLE: every row sees all of them. Everything is in base 2.
    """
    BLOCKS: tl.constexpr = STEP // BK
    ROWS: tl.constexpr = q.shape[0]
    n, d = first + tl.arange(0, STEP), tl.arange(0, DP)
    place = K + n.to(tl.int64)[None, :] * k_row + d[:, None] * k_dim
    if WHOLE:
        k = tl.load(place) if D == DP else tl.load(place, mask=(d < D)[:, None], other=0.0)
    else:
        k = tl.load(place, mask=(n < k_len)[None, :] & (d < D)[:, None], other=0.0)
    scores = tl.dot(q, k.to(tl.bfloat16)) * scale
    if not WHOLE:
        seen = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
        if HAS_VALID:
            seen = seen & (tl.load(VALID + n, mask=n < k_len, other=0) != 0)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    best_now = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(best_now == float("-inf"), 0.0, best_now)
    weight = tl.sum(tl.reshape(tl.exp2(scores - shift[:, None]), [ROWS, BLOCKS, BK]), 2)
    row, block = tl.arange(0, ROWS), first // BK + tl.arange(0, BLOCKS)
    place = LOGS + row[:, None] * width + block[None, :]
    tl.store(place, tl.log2(weight) + shift[:, None], mask=(block < width)[None, :])
    return best_now, total * tl.exp2(best - shift) + tl.sum(weight, 1)


@triton.jit(do_not_specialize=LENGTHS)
def probe(
    Q, K, VALID, UNBROKEN, Q_ENDS, K_ENDS,  # inputs
    LOGS,  # scratch: float32 [programs, ROWS, key blocks, rounded up to whole words]
    SHARES,  # output: float16 [heads from first_head on, share_rows, key blocks, rounded up]; see share_row
    heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, tiles, all_tiles, first_head,
    heads_here, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PROBES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, HAS_VALID: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    for n in range(tl.program_id(0), all_tiles, tl.num_programs(0)):
        probe_tile(
            Q, K, VALID, UNBROKEN, Q_ENDS, K_ENDS, LOGS + tl.program_id(0).to(tl.int64) * ROWS * words * WORD,
            SHARES, n % tiles, head_of_part(n // tiles, heads, first_head, heads_here, PACKED),
            heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, first_head, scale,
            q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
            D, DP, BQ, BK, PROBES, ROWS, STEP, HAS_VALID, PACKED,
        )  # fmt: skip


@triton.jit
def probe_tile(
    Q, K, VALID, UNBROKEN, Q_ENDS, K_ENDS, LOGS, SHARES, tile, bh,
    heads, kv_heads, q_len, k_len, q_tokens, k_tokens, share_rows, words, left, right, first_head, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, PROBES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, HAS_VALID: tl.constexpr, PACKED: tl.constexpr,
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
    q = tl.load(place + d[None, :] * q_dim, mask=real[:, None] & (d < D)[None, :], other=0.0).to(tl.bfloat16)
    K += batch * k_batch + (head // (heads // kv_heads)) * k_head + first_key * k_row
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
            best, total, q, low, high, K, VALID, LOGS, first, k_len, width, k_row, k_dim, scale,
            D, DP, BK, STEP, HAS_VALID, True,
        )  # fmt: skip
    for first in range(edge, end, STEP):
        best, total = probe_keys(
            best, total, q, low, high, K, VALID, LOGS, first, k_len, width, k_row, k_dim, scale,
            D, DP, BK, STEP, HAS_VALID, False,
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
