"""Preparation kernels: two passes over K and V, one over Q.

`key_sums` reads K and V once: sums of each sub-block of keys, largest magnitude and finiteness of the values.
`key_mean` turns the sums into the head's key mean and the value scales.
`prepare_keys`, `prepare_values` and `prepare_queries` read K and V a second time and Q once: block means,
self-similarity, rotated int8 copies, and V transposed to e4m3. Rotation is exact: 16-bit inputs meet a matrix of +-1
in a tensor-core product with float32 sums, and the mean is rotated once per head instead of once per row.

Row and head offsets are 64-bit throughout: a million tokens of many heads pass 2^31 elements.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits
FP8_MAX = tl.constexpr(448.0)
KEYS_PER_SCALE = tl.constexpr(64)


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Maximum along an axis that, unlike tl.max, keeps NaN."""
    return tl.reduce(x, axis, larger_or_nan)


@triton.jit
def scale_of(amax, limit):
    """largest magnitude / limit; NaN where the group held an infinity or NaN."""
    return tl.where(amax < float("inf"), amax / limit, float("nan"))


@triton.jit
def inverse_or_zero(scale):
    """1 / scale, and 0 where the scale is zero or NaN: one division a group, not one a number."""
    good = scale > 0
    return tl.where(good, 1.0 / tl.where(good, scale, 1.0), 0.0)


@triton.jit
def rotate(x, matrix, EXACT_PRODUCT: tl.constexpr):
    """Rows of x times the +-1 Walsh-Hadamard matrix, float32."""
    if EXACT_PRODUCT:
        rotated = tl.dot(x, matrix)
    else:
        rotated = tl.dot(x.to(tl.float32), matrix, input_precision="ieee")
    return rotated


@triton.jit
def round_to_int8(x, scale):
    """Integers in [-127, 127], channels in the order a tensor core's result leaves a thread's registers.

    Q and K are permuted alike, which leaves their products unchanged, and every thread stores contiguous bytes.
    """
    ROWS: tl.constexpr = x.shape[0]
    DP: tl.constexpr = x.shape[1]
    bits = (x * inverse_or_zero(scale)[:, None] + ROUND).to(tl.int32, bitcast=True)
    integers = tl.reshape(bits.to(tl.int8), [ROWS, DP // 8, 4, 2])
    return tl.reshape(tl.permute(integers, (0, 2, 1, 3)), [ROWS, DP])


@triton.jit
def key_sums(
    K, V, VALID,  # inputs
    SUMS, PARTIAL, V_MAX, V_FINITE,  # outputs: [BH, blocks, b, D], [BH, programs, D or Dv] twice, [BH, blocks]
    kv_heads, k_len, blocks,
    k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    SUBS: tl.constexpr, SUB_ROWS: tl.constexpr, SEGMENTS: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Each program sums SEGMENTS sub-blocks of one head, row by row: nothing moves between threads until the end."""
    bh = tl.program_id(1)
    wide = bh.to(tl.int64)
    batch = wide // kv_heads
    K += batch * k_batch + (wide % kv_heads) * k_head
    V += batch * v_batch + (wide % kv_heads) * v_head
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    sums = tl.zeros([SEGMENTS, DP], tl.float32)
    v_max = tl.zeros([SEGMENTS, DVP], tl.float32)
    for row in tl.range(0, SUB_ROWS, loop_unroll_factor=4):
        token = segment * SUB_ROWS + row
        real = token < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + batch * k_len + token, mask=real, other=0) != 0)
        at = token.to(tl.int64)[:, None]
        k = tl.load(K + at * k_row + d[None, :] * k_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
        sums += k.to(tl.float32)
        v_max = larger_or_nan(v_max, tl.abs(v.to(tl.float32)))
    real = segment < blocks * SUBS
    at = (wide * blocks * SUBS + segment)[:, None]
    tl.store(SUMS + at * D + d[None, :], sums, mask=real[:, None] & (d < D)[None, :])
    slot = wide * tl.num_programs(0) + tl.program_id(0)
    tl.store(PARTIAL + slot * D + d, tl.sum(sums, 0), mask=d < D)
    tl.store(V_MAX + slot * DV + dv, largest(v_max, 0), mask=dv < DV)
    block = tl.program_id(0) * (SEGMENTS // SUBS) + tl.arange(0, SEGMENTS // SUBS)
    worst = largest(tl.reshape(largest(v_max, 1), [SEGMENTS // SUBS, SUBS]), 1)
    tl.store(V_FINITE + wide * blocks + block, (worst < float("inf")).to(tl.int8), mask=block < blocks)


@triton.jit
def key_mean(
    PARTIAL, V_MAX, COUNT, HADAMARD,  # inputs; COUNT: valid keys per batch entry, or unused
    MEAN, ROTATED_MEAN, V_SCALE,  # outputs: [BH, D], [BH, DP], [BH, Dv]
    kv_heads, k_len, programs,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    TILE: tl.constexpr, HAS_VALID: tl.constexpr, ROTATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program per key/value head: the mean of its keys, and the scale of each value channel."""
    bh = tl.program_id(0)
    wide = bh.to(tl.int64)
    d, dv, t = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, TILE)
    total = tl.zeros([DP], tl.float32)
    v_max = tl.zeros([DVP], tl.float32)
    for first in range(0, programs, TILE):
        row = (wide * programs + first + t)[:, None]
        real = (first + t < programs)[:, None]
        total += tl.sum(tl.load(PARTIAL + row * D + d[None, :], mask=real & (d < D)[None, :], other=0.0), 0)
        if FP8:
            v = tl.load(V_MAX + row * DV + dv[None, :], mask=real & (dv < DV)[None, :], other=0.0)
            v_max = larger_or_nan(v_max, largest(v, 0))
    count = tl.load(COUNT + bh // kv_heads) if HAS_VALID else k_len
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(MEAN + wide * D + d, mean, mask=d < D)
    if ROTATE:
        matrix = tl.load(HADAMARD + d[:, None] * DP + d[None, :]).to(tl.float32)
        tl.store(ROTATED_MEAN + wide * DP + d, tl.sum(tl.where(d < D, mean, 0.0)[:, None] * matrix, 0))
    if FP8:
        tl.store(V_SCALE + wide * DV + dv, scale_of(v_max, FP8_MAX), mask=dv < DV)


@triton.jit
def prepare_keys(
    K, VALID, SUMS, MEAN, ROTATED_MEAN, HADAMARD,  # inputs
    K_MEANS, K_SIMILARITY, K8, K_SCALE,  # outputs
    kv_heads, k_len, blocks, padded, rotation_scale,
    k_batch, k_head, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
    HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, INT8: tl.constexpr, EXACT_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Each program finishes STEPS tiles of TILE keys of one head."""
    wide = tl.program_id(1).to(tl.int64)
    batch = wide // kv_heads
    K += batch * k_batch + (wide % kv_heads) * k_head
    d = tl.arange(0, DP)
    mean = tl.load(MEAN + wide * D + d, mask=d < D, other=0.0)
    if INT8:
        matrix = tl.load(HADAMARD + d[:, None] * DP + d[None, :]).to(K.dtype.element_ty)
        rotated_mean = tl.load(ROTATED_MEAN + wide * DP + d)
    start = tl.program_id(0) * STEPS
    for tile in range(start, tl.minimum(start + STEPS, padded // TILE)):
        first = tile * TILE
        rows = first + tl.arange(0, TILE)
        real = rows < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + batch * k_len + rows, mask=real, other=0) != 0)

        # Means of the smoothed sub-blocks, [b, blocks, D] per head.
        SEGMENTS: tl.constexpr = TILE // (BK // SUBS)
        segment = tl.arange(0, SEGMENTS)
        counts = tl.sum(tl.reshape(real.to(tl.float32), [SEGMENTS, BK // SUBS]), 1)
        block = first // BK + segment // SUBS
        kept = (block < blocks)[:, None] & (d < D)[None, :]
        source = (wide * blocks + block) * SUBS + segment % SUBS
        sums = tl.load(SUMS + source[:, None] * D + d[None, :], mask=kept, other=0.0)
        means = tl.where(counts[:, None] > 0, sums / tl.maximum(counts, 1.0)[:, None] - mean[None, :], 0.0)
        target = (wide * SUBS + segment % SUBS) * blocks + block
        tl.store(K_MEANS + target[:, None] * D + d[None, :], means.to(tl.bfloat16), mask=kept)

        if JUDGE or INT8:
            inside = real[:, None] & (d < D)[None, :]
            k = tl.load(K + rows.to(tl.int64)[:, None] * k_row + d[None, :] * k_dim, mask=inside, other=0.0)
            if JUDGE:
                smooth = tl.where(inside, k.to(tl.float32) - mean[None, :], 0.0)
                norm = tl.sqrt(tl.sum(smooth * smooth, 1))
                unit = tl.where((norm > 0)[:, None], smooth / tl.where(norm > 0, norm, 1.0)[:, None], smooth)
                in_block = tl.sum(tl.reshape(unit, [TILE // BK, BK, DP]), 1)
                n = tl.maximum(tl.sum(tl.reshape(real.to(tl.float32), [TILE // BK, BK]), 1), 1.0)
                similarity = tl.sum(in_block * in_block, 1) / (n * n)
                which = first // BK + tl.arange(0, TILE // BK)
                tl.store(K_SIMILARITY + wide * blocks + which, similarity, mask=which < blocks)
            if INT8:
                # Rows that hold no valid key were loaded as zeros, and stay zeros.
                rotated = rotate(k, matrix, EXACT_PRODUCT) - real.to(tl.float32)[:, None] * rotated_mean[None, :]
                GROUPS: tl.constexpr = TILE // KEYS_PER_SCALE
                amax = largest(tl.reshape(largest(tl.abs(rotated), 1), [GROUPS, KEYS_PER_SCALE]), 1)
                scale = scale_of(amax, 127.0)
                per_key = tl.reshape(tl.broadcast_to(scale[:, None], [GROUPS, KEYS_PER_SCALE]), [TILE])
                k8 = round_to_int8(rotated, per_key)
                tl.store(K8 + (wide * padded + rows)[:, None] * DP + d[None, :], k8)
                group = first // KEYS_PER_SCALE + tl.arange(0, GROUPS)
                tl.store(K_SCALE + wide * (padded // KEYS_PER_SCALE) + group, scale * rotation_scale)


@triton.jit
def prepare_values(
    V, VALID, V_SCALE,  # inputs
    V8,  # output: e4m3 [BH, DVP, padded length]
    kv_heads, k_len, padded, v_batch, v_head, v_row, v_dim,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Transpose V to 8 bits.

    The attention kernel hands P to the tensor core without moving it between threads; for that, the tokens of every
    sixteen stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """
    wide = tl.program_id(1).to(tl.int64)
    batch = wide // kv_heads
    V += batch * v_batch + (wide % kv_heads) * v_head
    dv, t = tl.arange(0, DVP), tl.arange(0, TILE)
    first = tl.program_id(0) * TILE
    source = first + (t & ~15) + (t & 1) + 2 * ((t >> 2) & 3) + 8 * ((t >> 1) & 1)
    real = source < k_len
    if HAS_VALID:
        real = real & (tl.load(VALID + batch * k_len + source, mask=real, other=0) != 0)
    at = source.to(tl.int64)[:, None]
    v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
    scale = tl.load(V_SCALE + wide * DV + dv, mask=dv < DV, other=0.0)
    ratio = v.to(tl.float32) * inverse_or_zero(scale)[None, :]
    v8 = tl.minimum(tl.maximum(ratio, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    tl.store(V8 + (wide * DVP + dv)[:, None] * padded + (first + t)[None, :], tl.trans(v8))


@triton.jit
def prepare_queries(
    Q, HADAMARD,  # inputs
    Q_MEANS, Q_SIMILARITY, Q8, Q_SCALE,  # outputs
    heads, q_len, blocks, rotation_scale,
    q_batch, q_head, q_row, q_dim,
    D: tl.constexpr, DP: tl.constexpr, SUBS: tl.constexpr, SUB_ROWS: tl.constexpr, SUB_PADDED: tl.constexpr,
    STEPS: tl.constexpr, JUDGE: tl.constexpr, INT8: tl.constexpr, EXACT_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Each program finishes STEPS query blocks of one head; sub-blocks are padded to a power of two of rows."""
    wide = tl.program_id(1).to(tl.int64)
    Q += (wide // heads) * q_batch + (wide % heads) * q_head
    t, d, sub = tl.arange(0, SUBS * SUB_PADDED), tl.arange(0, DP), tl.arange(0, SUBS)
    if INT8:
        matrix = tl.load(HADAMARD + d[:, None] * DP + d[None, :]).to(Q.dtype.element_ty)
    start = tl.program_id(0) * STEPS
    for block in range(start, tl.minimum(start + STEPS, blocks)):
        rows = block * (SUBS * SUB_ROWS) + (t // SUB_PADDED) * SUB_ROWS + t % SUB_PADDED
        real = (rows < q_len) & (t % SUB_PADDED < SUB_ROWS)
        inside = real[:, None] & (d < D)[None, :]
        q = tl.load(Q + rows.to(tl.int64)[:, None] * q_row + d[None, :] * q_dim, mask=inside, other=0.0)
        counts = tl.sum(tl.reshape(real.to(tl.float32), [SUBS, SUB_PADDED]), 1)
        if EXACT_PRODUCT:
            # Sums by tensor core: a matrix of ones and zeros picks each sub-block's rows.
            pick = tl.arange(0, 16)
            picks = (pick[:, None] == (t // SUB_PADDED)[None, :]).to(tl.float32)
            sums = tl.dot(picks.to(q.dtype), q)
            left = q_len - block * (SUBS * SUB_ROWS) - pick * SUB_ROWS
            means = sums / tl.minimum(tl.maximum(left, 1), SUB_ROWS).to(tl.float32)[:, None]
            target = ((wide * blocks + block) * SUBS + pick)[:, None] * D + d[None, :]
            tl.store(Q_MEANS + target, means.to(tl.bfloat16), mask=(pick < SUBS)[:, None] & (d < D)[None, :])
        else:
            means = tl.sum(tl.reshape(q, [SUBS, SUB_PADDED, DP]), 1) / tl.maximum(counts, 1.0)[:, None]
            target = ((wide * blocks + block) * SUBS + sub)[:, None] * D + d[None, :]
            tl.store(Q_MEANS + target, means.to(tl.bfloat16), mask=(d < D)[None, :])
        if JUDGE:
            wide_q = q.to(tl.float32)
            norm = tl.sqrt(tl.sum(wide_q * wide_q, 1))
            unit = tl.where((norm > 0)[:, None], wide_q / tl.where(norm > 0, norm, 1.0)[:, None], wide_q)
            total, n = tl.sum(unit, 0), tl.sum(counts, 0)
            tl.store(Q_SIMILARITY + wide * blocks + block, tl.sum(total * total, 0) / (n * n))
        if INT8:
            rotated = rotate(q, matrix, EXACT_PRODUCT)
            scale = scale_of(largest(tl.abs(rotated), 1), 127.0)
            at = wide * q_len + rows
            tl.store(Q8 + at[:, None] * DP + d[None, :], round_to_int8(rotated, scale), mask=real[:, None])
            tl.store(Q_SCALE + at, scale * rotation_scale, mask=real)
