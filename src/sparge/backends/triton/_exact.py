"""Dense attention of a few rows of each head, for the error budget: too few to fill a chip unless keys are divided.

`attend_rows` computes a tile of rows over one part of the keys; `merge_parts` puts the parts together by their LSE;
`judge` compares a result with them. The torch twins are in `sparge.exact` and `sparge.judging`.
"""

import triton
import triton.language as tl

from sparge.backends.triton._attend import lane_sums

LENGTHS = ["heads", "group_size", "count", "q_len", "k_len", "left", "right", "tiles", "parts", "keys_per_part"]


@triton.jit
def fold_keys(
    acc, total, best, q, low, high, K, V, VALID, first, k_len, k_row, k_dim, v_row, v_dim, scale,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, STEP: tl.constexpr,
    HAS_VALID: tl.constexpr, WHOLE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Fold STEP keys into the running (acc, total, best), in base 2.

    WHOLE: every row sees all of them. INSIDE: all of them exist, and none is padding.
    """
    n, d, dv = first + tl.arange(0, STEP), tl.arange(0, DP), tl.arange(0, DVP)
    wide = n.to(tl.int64)
    k_place = K + wide[None, :] * k_row + d[:, None] * k_dim
    v_place = V + wide[:, None] * v_row + dv[None, :] * v_dim
    if INSIDE:
        k = tl.load(k_place) if D == DP else tl.load(k_place, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_place) if DV == DVP else tl.load(v_place, mask=(dv < DV)[None, :], other=0.0)
    else:
        real = n < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + n, mask=real, other=0) != 0)
        k = tl.load(k_place, mask=real[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_place, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
    scores = tl.dot(q, k) * scale
    if not WHOLE:
        seen = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
        if not INSIDE:
            seen = seen & real[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    best_now = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(best_now == float("-inf"), 0.0, best_now)
    alpha = tl.exp2(best - shift)
    p = tl.exp2(scores - shift[:, None])
    total = total * alpha[:, None] + lane_sums(p)
    return tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), total, best_now


@triton.jit(do_not_specialize=LENGTHS)
def attend_rows(
    Q, K, V, VALID, UNBROKEN, AT,  # inputs; AT: int64 [count], the rows
    VALUES, LSE,  # outputs: float32 [BH, parts, count, DV] and [BH, parts, count], in base 2
    heads, group_size, count, q_len, k_len, left, right, tiles, parts, keys_per_part, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    HAS_VALID: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the rows of one head, over one part of the keys. A part without keys has an LSE of -inf."""
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % parts
    wide = (tl.program_id(0) // (tiles * parts)).to(tl.int64)
    batch, head = wide // heads, wide % heads
    i, d, dv = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, DVP)
    real = i < count
    row = tl.load(AT + i, mask=real, other=0)
    position = row + (k_len - q_len)
    low = tl.where(real, tl.maximum(position - left, 0), k_len).to(tl.int32)
    high = tl.where(real, tl.minimum(position + right + 1, k_len), 0).to(tl.int32)
    begin = tl.maximum(tl.min(low, 0) // STEP * STEP, part * keys_per_part)
    end = tl.minimum(tl.max(high, 0), (part + 1) * keys_per_part)
    # Up to here all rows see every key.
    seen_by_all = tl.min(tl.where(real, high, k_len), 0)
    if HAS_VALID:
        seen_by_all = tl.minimum(seen_by_all, tl.load(UNBROKEN + batch))
        VALID += batch * k_len
    edge = tl.minimum(seen_by_all, end) // STEP * STEP
    edge = tl.maximum(tl.where(tl.max(tl.where(real, low, 0), 0) == 0, edge, begin), begin)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head // group_size * k_head
    V += batch * v_batch + head // group_size * v_head
    q = tl.load(Q + row[:, None] * q_row + d[None, :] * q_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    total = tl.zeros([ROWS, 8], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(begin, edge, STEP):
        acc, total, best = fold_keys(
            acc, total, best, q, low, high, K, V, VALID, first, k_len, k_row, k_dim, v_row, v_dim, scale,
            D, DV, DP, DVP, STEP, HAS_VALID, True, True,
        )  # fmt: skip
    last = edge if HAS_VALID else tl.maximum(tl.minimum(end, k_len // STEP * STEP), edge)
    for first in range(edge, last, STEP):
        acc, total, best = fold_keys(
            acc, total, best, q, low, high, K, V, VALID, first, k_len, k_row, k_dim, v_row, v_dim, scale,
            D, DV, DP, DVP, STEP, HAS_VALID, False, True,
        )  # fmt: skip
    for first in range(last, end, STEP):
        acc, total, best = fold_keys(
            acc, total, best, q, low, high, K, V, VALID, first, k_len, k_row, k_dim, v_row, v_dim, scale,
            D, DV, DP, DVP, STEP, HAS_VALID, False, False,
        )  # fmt: skip
    total = tl.sum(total, 1)
    place = (wide * parts + part) * count + i
    tl.store(LSE + place, best + tl.log2(total), mask=real)
    if begin < end:  # else nobody reads it
        out = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(VALUES + place[:, None] * DV + dv[None, :], out, mask=real[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["count", "parts", "tiles"])
def merge_parts(
    VALUES, LSE, OUT, count, parts, tiles, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """OUT [BH, count, DV]: the parts, each by its weight; rows that see nothing give 0."""
    wide = (tl.program_id(0) // tiles).to(tl.int64)
    i, dv = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS), tl.arange(0, DVP)
    real = i < count
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(parts):
        best = tl.maximum(best, tl.load(LSE + (wide * parts + part) * count + i, mask=real, other=float("-inf")))
    acc = tl.zeros([ROWS, DVP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in range(parts):
        place = (wide * parts + part) * count + i
        lse = tl.load(LSE + place, mask=real, other=float("-inf"))
        there = lse != float("-inf")  # NaN is
        weight = tl.where(there, tl.exp2(lse - best), 0.0)
        mask = (real & there)[:, None] & (dv < DV)[None, :]
        acc += weight[:, None] * tl.load(VALUES + place[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        total += weight
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    place = OUT + (wide * count + i)[:, None] * DV + dv[None, :]
    tl.store(place, out.to(OUT.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


@triton.jit
def row_errors(
    VALUES, EXACT, AT, first, count, row_stride, channel_stride, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Of some rows: the L1 of each as it should be, and of what it is off."""
    i, dv = first + tl.arange(0, ROWS), tl.arange(0, DVP)
    mask = (i < count)[:, None] & (dv < DV)[None, :]
    at = tl.load(AT + i, mask=i < count, other=0)
    exact = tl.load(EXACT + i[:, None] * DV + dv[None, :], mask=mask, other=0.0).to(tl.float32)
    place = VALUES + at[:, None] * row_stride + dv[None, :] * channel_stride
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(tl.abs(exact), 1), tl.sum(tl.abs(values - exact), 1)


@triton.jit(do_not_specialize=["heads", "count"])
def judge(
    VALUES, EXACT, AT,  # [B, Hq, Nq, DV] by strides; [BH, count, DV]; int64 [count]
    ERROR, OVER,  # outputs: float32 [BH]; int8 [BH]
    heads, count, max_error, deviations, o_batch, o_head, o_row, o_dim,
    DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: the relative L1 of one head, and whether with its deviations it may exceed max_error."""
    wide = tl.program_id(0).to(tl.int64)
    VALUES += wide // heads * o_batch + wide % heads * o_head
    EXACT += wide * count * DV
    sizes, offs, squares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, count, ROWS):
        size, off = row_errors(VALUES, EXACT, AT, first, count, o_row, o_dim, DV, DVP, ROWS)
        sizes += size
        offs += off
    total = tl.maximum(tl.sum(sizes, 0), 1.1754943508222875e-38)
    error = tl.sum(offs, 0) / total
    for first in range(0, count, ROWS):
        size, off = row_errors(VALUES, EXACT, AT, first, count, o_row, o_dim, DV, DVP, ROWS)
        squares += (off - error * size) * (off - error * size)
    bound = error + deviations * tl.sqrt(tl.sum(squares, 0)) / total
    tl.store(ERROR + wide, error)
    tl.store(OVER + wide, tl.where(bound <= max_error, 0, 1))  # NaN is over
