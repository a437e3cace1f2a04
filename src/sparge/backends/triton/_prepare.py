"""Preparation kernels: two passes over K and V, one over Q.

`key_sums` reads K and V once: sums of each sub-block of keys, largest magnitude and finiteness of the values.
`key_mean` turns the sums into the head's key mean and the value scales.
`prepare_keys` and `prepare_queries` read the tensors a second (K, V) and a first (Q) time: block means,
self-similarity, rotated int8 copies, and V transposed to e4m3. Rotation is exact: 16-bit inputs meet a matrix of +-1
in a tensor-core product with float32 sums, and the mean is rotated once per head instead of once per row.

Row and head offsets are 64-bit throughout: a million tokens of many heads pass 2^31 elements.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds half to even
INFINITY_BITS = tl.constexpr(0x7F800000)
KEYS_PER_SCALE = tl.constexpr(64)
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def magnitude_bits(x):
    """|x| as integers that order like the floats, infinity and NaN on top: a plain maximum then keeps NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def scale_from_bits(bits, limit):
    """largest magnitude / limit; NaN where the group held an infinity or NaN."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, amax / limit, float("nan"))


@triton.jit
def divide_or_zero(x, scale):
    """x / scale, and 0 where the scale is zero or NaN."""
    good = scale > 0
    return tl.where(good, x / tl.where(good, scale, 1.0), 0.0)


@triton.jit
def rotate(x, HADAMARD, DP: tl.constexpr, EXACT_PRODUCT: tl.constexpr):
    """Rows of x times the +-1 Walsh-Hadamard matrix, float32."""
    d = tl.arange(0, DP)
    matrix = tl.load(HADAMARD + d[:, None] * DP + d[None, :])
    if EXACT_PRODUCT:
        return tl.dot(x, matrix.to(x.dtype))
    return tl.dot(x.to(tl.float32), matrix.to(tl.float32), input_precision="ieee")


@triton.jit
def key_sums(
    K, V, VALID,  # inputs
    SUMS, V_BITS, V_FINITE,  # outputs: [BH, blocks, b, D], [BH, programs, Dv], [BH, blocks]
    kv_heads, k_len, blocks,
    k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BK: tl.constexpr, SUBS: tl.constexpr, STEPS: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Each program reads STEPS key blocks of one head."""
    bh = tl.program_id(1)
    batch = (bh // kv_heads).to(tl.int64)
    head = (bh % kv_heads).to(tl.int64)
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    d, dv, sub = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, SUBS)
    v_bits = tl.zeros([DVP], tl.int32)
    first = tl.program_id(0) * STEPS
    for block in range(first, tl.minimum(first + STEPS, blocks)):
        rows = block * BK + tl.arange(0, BK)
        real = rows < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + batch * k_len + rows, mask=real, other=0) != 0)
        at = rows.to(tl.int64)[:, None]
        k = tl.load(K + at * k_row + d[None, :] * k_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
        sums = tl.sum(tl.reshape(k.to(tl.float32), [SUBS, BK // SUBS, DP]), 1)
        place = (bh.to(tl.int64) * blocks + block) * SUBS + sub[:, None]
        tl.store(SUMS + place * D + d[None, :], sums, mask=(d < D)[None, :])
        bits = tl.max(magnitude_bits(v.to(tl.float32)), 0)
        v_bits = tl.maximum(v_bits, bits)
        tl.store(V_FINITE + bh.to(tl.int64) * blocks + block, (tl.max(bits, 0) < INFINITY_BITS).to(tl.int8))
    slot = bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(V_BITS + slot * DV + dv, v_bits, mask=dv < DV)


@triton.jit
def key_mean(
    SUMS, V_BITS, COUNT, HADAMARD,  # inputs; COUNT: valid keys per batch entry, or unused
    MEAN, ROTATED_MEAN, V_SCALE,  # outputs: [BH, D], [BH, DP], [BH, Dv]
    kv_heads, k_len, blocks, programs, rotation_scale,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    SUBS: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr, ROTATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program per key/value head: the mean of its keys, and the scale of each value channel."""
    bh = tl.program_id(0)
    wide = bh.to(tl.int64)
    d, dv, t = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, TILE)
    total = tl.zeros([DP], tl.float32)
    for first in range(0, blocks * SUBS, TILE):
        at = wide * blocks * SUBS + first + t
        inside = (first + t < blocks * SUBS)[:, None] & (d < D)[None, :]
        total += tl.sum(tl.load(SUMS + at[:, None] * D + d[None, :], mask=inside, other=0.0), 0)
    count = tl.load(COUNT + bh // kv_heads) if HAS_VALID else k_len
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(MEAN + wide * D + d, mean, mask=d < D)
    if ROTATE:
        matrix = tl.load(HADAMARD + d[:, None] * DP + d[None, :]).to(tl.float32)
        rotated = tl.sum(tl.where(d < D, mean, 0.0)[:, None] * matrix, 0) * rotation_scale
        tl.store(ROTATED_MEAN + wide * DP + d, rotated)
    if FP8:
        bits = tl.zeros([DVP], tl.int32)
        for first in range(0, programs, TILE):
            at = (wide * programs + first + t)[:, None] * DV + dv[None, :]
            inside = (first + t < programs)[:, None] & (dv < DV)[None, :]
            bits = tl.maximum(bits, tl.max(tl.load(V_BITS + at, mask=inside, other=0), 0))
        tl.store(V_SCALE + wide * DV + dv, scale_from_bits(bits, FP8_MAX), mask=dv < DV)


@triton.jit
def prepare_keys(
    K, V, VALID, SUMS, MEAN, ROTATED_MEAN, V_SCALE, HADAMARD,  # inputs
    K_MEANS, K_SIMILARITY, K8, K_SCALE, V8,  # outputs; V8 is [BH, DVP, padded length]
    kv_heads, k_len, blocks, padded, rotation_scale,
    k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BK: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr,
    JUDGE: tl.constexpr, INT8: tl.constexpr, FP8: tl.constexpr, EXACT_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Each program finishes TILE keys: TILE / BK blocks."""
    bh = tl.program_id(1)
    wide = bh.to(tl.int64)
    batch = wide // kv_heads
    head = wide % kv_heads
    K += batch * k_batch + head * k_head
    V += batch * v_batch + head * v_head
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    first = tl.program_id(0) * TILE
    rows = first + tl.arange(0, TILE)
    real = rows < k_len
    if HAS_VALID:
        real = real & (tl.load(VALID + batch * k_len + rows, mask=real, other=0) != 0)
    mean = tl.load(MEAN + wide * D + d, mask=d < D, other=0.0)

    # Means of the smoothed sub-blocks, [b, blocks, D] per head.
    SEGMENTS: tl.constexpr = TILE // (BK // SUBS)
    segment = tl.arange(0, SEGMENTS)
    counts = tl.sum(tl.reshape(real.to(tl.float32), [SEGMENTS, BK // SUBS]), 1)
    block = first // BK + segment // SUBS
    kept = (block < blocks)[:, None] & (d < D)[None, :]
    at = (wide * blocks + block) * SUBS + segment % SUBS
    sums = tl.load(SUMS + at[:, None] * D + d[None, :], mask=kept, other=0.0)
    means = tl.where(counts[:, None] > 0, sums / tl.maximum(counts, 1.0)[:, None] - mean[None, :], 0.0)
    at = (wide * SUBS + segment % SUBS) * blocks + block
    tl.store(K_MEANS + at[:, None] * D + d[None, :], means.to(tl.bfloat16), mask=kept)

    if JUDGE or INT8:
        at = rows.to(tl.int64)[:, None]
        k = tl.load(K + at * k_row + d[None, :] * k_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        if JUDGE:
            smooth = tl.where(real[:, None] & (d < D)[None, :], k.to(tl.float32) - mean[None, :], 0.0)
            norm = tl.sqrt(tl.sum(smooth * smooth, 1))
            unit = tl.where((norm > 0)[:, None], smooth / tl.where(norm > 0, norm, 1.0)[:, None], smooth)
            in_block = tl.sum(tl.reshape(unit, [TILE // BK, BK, DP]), 1)
            n = tl.maximum(tl.sum(tl.reshape(real.to(tl.float32), [TILE // BK, BK]), 1), 1.0)
            similarity = tl.sum(in_block * in_block, 1) / (n * n)
            which = first // BK + tl.arange(0, TILE // BK)
            tl.store(K_SIMILARITY + wide * blocks + which, similarity, mask=which < blocks)
        if INT8:
            rotated = rotate(k, HADAMARD, DP, EXACT_PRODUCT) * rotation_scale
            rotated = rotated - tl.load(ROTATED_MEAN + wide * DP + d)[None, :]
            rotated = tl.where(real[:, None], rotated, 0.0)
            GROUPS: tl.constexpr = TILE // KEYS_PER_SCALE
            bits = tl.max(tl.reshape(tl.max(magnitude_bits(rotated), 1), [GROUPS, KEYS_PER_SCALE]), 1)
            scale = scale_from_bits(bits, 127.0)
            per_key = tl.reshape(tl.broadcast_to(scale[:, None], [GROUPS, KEYS_PER_SCALE]), [TILE])
            ratio = divide_or_zero(rotated, per_key[:, None])
            tl.store(K8 + (wide * padded + rows)[:, None] * DP + d[None, :], ((ratio + ROUND) - ROUND).to(tl.int8))
            group = first // KEYS_PER_SCALE + tl.arange(0, GROUPS)
            tl.store(K_SCALE + wide * (padded // KEYS_PER_SCALE) + group, scale)
    if FP8:
        # The attention kernel hands P to the tensor core without moving it between threads; for that, the tokens of
        # every sixteen stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
        t = tl.arange(0, TILE)
        source = first + (t & ~15) + (t & 1) + 2 * ((t >> 2) & 3) + 8 * ((t >> 1) & 1)
        real = source < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + batch * k_len + source, mask=real, other=0) != 0)
        at = source.to(tl.int64)[:, None]
        v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
        scale = tl.load(V_SCALE + wide * DV + dv, mask=dv < DV, other=0.0)
        ratio = divide_or_zero(v.to(tl.float32), scale[None, :])
        v8 = tl.minimum(tl.maximum(ratio, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
        tl.store(V8 + (wide * DVP + dv)[:, None] * padded + rows[None, :], tl.trans(v8))


@triton.jit
def prepare_queries(
    Q, HADAMARD,  # inputs
    Q_MEANS, Q_SIMILARITY, Q8, Q_SCALE,  # outputs
    heads, q_len, blocks, rotation_scale,
    q_batch, q_head, q_row, q_dim,
    D: tl.constexpr, DP: tl.constexpr, SUBS: tl.constexpr, SUB_ROWS: tl.constexpr, SUB_PADDED: tl.constexpr,
    JUDGE: tl.constexpr, INT8: tl.constexpr, EXACT_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Each program finishes one query block; sub-blocks are padded to a power of two of rows."""
    bh = tl.program_id(1)
    wide = bh.to(tl.int64)
    Q += (wide // heads) * q_batch + (wide % heads) * q_head
    block = tl.program_id(0)
    t, d, sub = tl.arange(0, SUBS * SUB_PADDED), tl.arange(0, DP), tl.arange(0, SUBS)
    rows = block * (SUBS * SUB_ROWS) + (t // SUB_PADDED) * SUB_ROWS + t % SUB_PADDED
    real = (rows < q_len) & (t % SUB_PADDED < SUB_ROWS)
    q = tl.load(
        Q + rows.to(tl.int64)[:, None] * q_row + d[None, :] * q_dim, mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    wide_q = q.to(tl.float32)
    counts = tl.sum(tl.reshape(real.to(tl.float32), [SUBS, SUB_PADDED]), 1)
    sums = tl.sum(tl.reshape(wide_q, [SUBS, SUB_PADDED, DP]), 1)
    means = sums / tl.maximum(counts, 1.0)[:, None]
    at = ((wide * blocks + block) * SUBS + sub)[:, None] * D + d[None, :]
    tl.store(Q_MEANS + at, means.to(tl.bfloat16), mask=(d < D)[None, :])
    if JUDGE:
        norm = tl.sqrt(tl.sum(wide_q * wide_q, 1))
        unit = tl.where((norm > 0)[:, None], wide_q / tl.where(norm > 0, norm, 1.0)[:, None], wide_q)
        total, n = tl.sum(unit, 0), tl.sum(counts, 0)
        tl.store(Q_SIMILARITY + wide * blocks + block, tl.sum(total * total, 0) / (n * n))
    if INT8:
        rotated = rotate(q, HADAMARD, DP, EXACT_PRODUCT) * rotation_scale
        scale = scale_from_bits(tl.max(magnitude_bits(rotated), 1), 127.0)
        ratio = divide_or_zero(rotated, scale[:, None])
        at = wide * q_len + rows
        tl.store(Q8 + at[:, None] * DP + d[None, :], ((ratio + ROUND) - ROUND).to(tl.int8), mask=real[:, None])
        tl.store(Q_SCALE + at, scale, mask=real)
