"""Preparation: two passes over K and V, one over Q.

Work is cut into items, a range of tokens of one head. There are four kinds: `sum_keys` (sums of K, largest magnitude
and finiteness of V), `finish_queries`, `finish_keys` (block means, self-similarity, rotated int8 copies) and
`finish_values` (V transposed to e4m3). The last `sum_keys` item of a head makes its key mean and value scales.

Rotation is exact: 16-bit inputs meet a matrix of +-1 in a tensor-core product with float32 sums, and the mean is
rotated once per head instead of once per row. Row and head offsets are 64-bit throughout: a million tokens of many
heads pass 2^31 elements.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits
FP8_MAX = tl.constexpr(448.0)
ROWS = tl.constexpr(64)  # query rows of one step
KEYS_PER_SCALE = tl.constexpr(64)
PICKS = tl.constexpr(16)  # most sub-blocks in a tile, and the fewest rows a tensor core takes
SEQUENCE_TILE = tl.constexpr(128)  # packed key sequences start at multiples of this
MATRIX = tl.constexpr(128)  # the largest rotation done as one product


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
def two_parts(x):
    """bfloat16 numbers whose sum has the first 16 bits of x: more than enough for 8-bit results."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def times_signs(x, signs):
    """x @ signs, float32; products are exact."""
    if x.dtype == tl.float32:
        high, low = two_parts(x)
        product = tl.dot(high, signs, tl.dot(low, signs))
    else:
        product = tl.dot(x, signs)
    return product


@triton.jit
def sums_of_picked(picks, x):
    """The sum of the rows of x that each row of `picks` names, float32."""
    if x.dtype == tl.float32:
        high, low = two_parts(x)
        picks = picks.to(tl.bfloat16)
        sums = tl.dot(picks, high, tl.dot(picks, low))
    else:
        sums = tl.dot(picks.to(x.dtype), x)
    return sums


@triton.jit
def rotation(HADAMARD, DP: tl.constexpr, DTYPE: tl.constexpr):
    SIDE: tl.constexpr = DP if DP < MATRIX else MATRIX
    side = tl.arange(0, SIDE)
    matrix = tl.load(HADAMARD + side[:, None] * SIDE + side[None, :])
    if DTYPE == tl.float16:  # noqa: SIM300
        matrix = matrix.to(tl.float16)
    return matrix


@triton.jit
def rotate_wide(X, rows, x_row, x_dim, real, matrix, D: tl.constexpr):
    """Rows of X rotated by the 256-channel matrix, as halves: two products and a butterfly."""
    d = tl.arange(0, MATRIX)
    X += rows.to(tl.int64)[:, None] * x_row + d[None, :] * x_dim
    left = times_signs(tl.load(X, mask=real[:, None], other=0.0), matrix)
    inside = real[:, None] & (d + MATRIX < D)[None, :]
    right = times_signs(tl.load(X + MATRIX * x_dim, mask=inside, other=0.0), matrix)
    return left + right, left - right


@triton.jit
def round_to_int8(x, inverse):
    """Integers in [-127, 127], channels in the order a tensor core's result leaves a thread's registers.

    Q and K are permuted alike, which leaves their products unchanged, and every thread stores contiguous bytes.
    """
    ROWS: tl.constexpr = x.shape[0]
    DP: tl.constexpr = x.shape[1]
    bits = (x * inverse + ROUND).to(tl.int32, bitcast=True)
    integers = tl.reshape(bits.to(tl.int8), [ROWS, DP // 8, 4, 2])
    return tl.reshape(tl.permute(integers, (0, 2, 1, 3)), [ROWS, DP])


@triton.jit
def sequence(ENDS, batch, length, tokens, PACKED: tl.constexpr):
    """The first token and the length of a sequence. Bad ends are cut to the tensor, so that nothing is read outside."""
    first = batch * 0
    if PACKED:
        first = tl.minimum(tl.maximum(tl.load(ENDS + batch).to(tl.int64), 0), tokens)
        stop = tl.minimum(tl.load(ENDS + batch + 1).to(tl.int64), tokens)
        length = tl.minimum(tl.maximum(stop - first, 0), length).to(tl.int32)
    return first, length


@triton.jit
def head_row(batch, head, heads, PACKED: tl.constexpr):
    """Which row of a [batch, heads] tensor a head is; packed sequences share one."""
    return head if PACKED else batch * heads + head


@triton.jit
def slot_of(first, batch, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Where a sequence's blocks start among all: every earlier sequence wasted less than one."""
    return first // SIZE + batch if PACKED else first


@triton.jit
def visible_rows(VALID, rows, length, HAS_VALID: tl.constexpr):
    real = rows < length
    if HAS_VALID:
        real = real & (tl.load(VALID + rows, mask=real, other=0) != 0)
    return real


@triton.jit
def picks_of(start, SUB_ROWS: tl.constexpr):
    """Ones and zeros [16, 64]: which of 64 rows, whose first is `start` in its block, belong to which sub-block."""
    row = (start + tl.arange(0, ROWS)) // SUB_ROWS
    return (tl.arange(0, PICKS)[:, None] == row[None, :]).to(tl.float32)


@triton.jit
def unit_rows(x):
    """Rows scaled to length 1; zero rows stay."""
    norm = tl.sqrt(tl.sum(x * x, 1))
    return tl.where((norm > 0)[:, None], x / tl.where(norm > 0, norm, 1.0)[:, None], x)


@triton.jit
def sum_keys(
    K, V, VALID, SUMS, PARTIAL, V_MAX, V_FINITE, k_len, first_segment, k_row, k_dim, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, SUBS: tl.constexpr, SUB_ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Sums of SEGMENTS sub-blocks of keys, row by row: nothing moves between threads until the end. Largest |V|."""
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    segment = first_segment + tl.arange(0, SEGMENTS)
    sums = tl.zeros([SEGMENTS, DP], tl.float32)
    v_max = tl.zeros([SEGMENTS, DVP], tl.float32)
    for row in tl.range(0, SUB_ROWS, loop_unroll_factor=4):
        token = segment * SUB_ROWS + row
        real = visible_rows(VALID, token, k_len, HAS_VALID)
        at = token.to(tl.int64)[:, None]
        k = tl.load(K + at * k_row + d[None, :] * k_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
        sums += k.to(tl.float32)
        v_max = larger_or_nan(v_max, tl.abs(v.to(tl.float32)))
    blocks = tl.cdiv(k_len, SUBS * SUB_ROWS)
    inside = (segment < blocks * SUBS)[:, None] & (d < D)[None, :]
    tl.store(SUMS + segment.to(tl.int64)[:, None] * D + d[None, :], sums, mask=inside)
    tl.store(PARTIAL + d, tl.sum(sums, 0), mask=d < D)
    tl.store(V_MAX + dv, largest(v_max, 0), mask=dv < DV)
    block = first_segment // SUBS + tl.arange(0, SEGMENTS // SUBS)
    worst = largest(tl.reshape(largest(v_max, 1), [SEGMENTS // SUBS, SUBS]), 1)
    tl.store(V_FINITE + block, (worst < float("inf")).to(tl.int8), mask=block < blocks)


@triton.jit
def finish_sums(
    PARTIAL, V_MAX, HADAMARD, MEAN, ROTATED_MEAN, V_SCALE, items, count,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROTATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One head: the mean of its keys, and the scale of each value channel."""
    d, dv, t = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, 32)
    total = tl.zeros([32, DP], tl.float32)
    v_max = tl.zeros([32, DVP], tl.float32)
    for first in range(0, items, 32):
        row, real = (first + t)[:, None], (first + t < items)[:, None]
        total += tl.load(PARTIAL + row * D + d[None, :], mask=real & (d < D)[None, :], other=0.0)
        if FP8:
            v = tl.load(V_MAX + row * DV + dv[None, :], mask=real & (dv < DV)[None, :], other=0.0)
            v_max = larger_or_nan(v_max, v)
    mean = tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32)
    tl.store(MEAN + d, mean, mask=d < D)
    if FP8:
        tl.store(V_SCALE + dv, scale_of(largest(v_max, 0), FP8_MAX), mask=dv < DV)
    if ROTATE:
        # Entry (i, j) is the parity of the bits i and j share: rows come in chunks of 16, small enough for registers.
        tl.debug_barrier()
        SIDE: tl.constexpr = DP if DP < MATRIX else MATRIX
        rotated = tl.zeros([DP], tl.float32)
        for chunk in range(0, DP, 16):
            i = chunk + tl.arange(0, 16)
            part = tl.load(MEAN + i, mask=i < D, other=0.0)
            matrix = tl.load(HADAMARD + (i % SIDE)[:, None] * SIDE + (d % SIDE)[None, :]).to(tl.float32)
            matrix = tl.where((i >= SIDE)[:, None] & (d >= SIDE)[None, :], -matrix, matrix)
            rotated += tl.sum(part[:, None] * matrix, 0)
        tl.store(ROTATED_MEAN + d, rotated)


@triton.jit
def finish_keys(
    K, VALID, SUMS, MEAN, ROTATED_MEAN, HADAMARD, K_MEANS, K_SIMILARITY, K8, K_SCALE,
    k_len, blocks, sub_stride, first_key, last_key, rotation_scale, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr,
    HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Block means, self-similarity and int8 copies of one range of keys, TILE at a time."""
    SUB_ROWS: tl.constexpr = BK // SUBS
    SEGMENTS: tl.constexpr = TILE // SUB_ROWS if TILE > SUB_ROWS else 1  # sub-blocks that begin in a tile
    WHOLE: tl.constexpr = TILE // BK if BK < TILE else 1  # blocks per tile
    TILES: tl.constexpr = BK // TILE if BK > TILE else 1  # tiles per block
    GROUPS: tl.constexpr = TILE // KEYS_PER_SCALE
    d, t = tl.arange(0, DP), tl.arange(0, TILE)
    mean = tl.load(MEAN + d, mask=d < D, other=0.0)
    if INT8:
        matrix = rotation(HADAMARD, DP, K.dtype.element_ty)
        side = tl.arange(0, matrix.shape[0])
        rotated_mean = tl.load(ROTATED_MEAN + side)
        if DP > MATRIX:
            rotated_mean_high = tl.load(ROTATED_MEAN + MATRIX + side)
    units = tl.zeros([WHOLE, DP], tl.float32)
    members = tl.zeros([WHOLE], tl.float32)
    for first in range(first_key, last_key, TILE):
        rows = first + t
        real = visible_rows(VALID, rows, k_len, HAS_VALID)

        # Means of the smoothed sub-blocks that begin here, [b, blocks, D] per head.
        segment = first // SUB_ROWS + tl.arange(0, SEGMENTS)
        begins = segment * SUB_ROWS
        if HAS_VALID:
            at = begins[:, None] + tl.arange(0, SUB_ROWS)[None, :]
            counts = tl.sum(tl.load(VALID + at, mask=at < k_len, other=0).to(tl.float32), 1)
        else:
            counts = tl.minimum(tl.maximum(k_len - begins, 0), SUB_ROWS).to(tl.float32)
        block = segment // SUBS
        kept = ((block < blocks) & (begins >= first))[:, None] & (d < D)[None, :]
        sums = tl.load(SUMS + segment.to(tl.int64)[:, None] * D + d[None, :], mask=kept, other=0.0)
        share = 1.0 / tl.maximum(counts, 1.0)  # exact for whole sub-blocks
        means = tl.where(counts[:, None] > 0, sums * share[:, None] - mean[None, :], 0.0)
        target = (segment % SUBS).to(tl.int64) * sub_stride + block
        tl.store(K_MEANS + target[:, None] * D + d[None, :], means.to(tl.bfloat16), mask=kept)

        inside = real[:, None] & (d < D)[None, :]
        if JUDGE or (INT8 and DP <= MATRIX):
            k = tl.load(K + rows.to(tl.int64)[:, None] * k_row + d[None, :] * k_dim, mask=inside, other=0.0)
        if JUDGE:
            unit = unit_rows(tl.where(inside, k.to(tl.float32) - mean[None, :], 0.0))
            new_block = (first // TILE) % TILES == 0
            units = tl.where(new_block, 0.0, units) + tl.sum(tl.reshape(unit, [WHOLE, TILE // WHOLE, DP]), 1)
            in_block = tl.sum(tl.reshape(real.to(tl.float32), [WHOLE, TILE // WHOLE]), 1)
            members = tl.where(new_block, 0.0, members) + in_block
            n = tl.maximum(members, 1.0)
            which = first // BK + tl.arange(0, WHOLE)
            finished = tl.where((first // TILE) % TILES == TILES - 1, blocks, 0)  # store a block when it is complete
            tl.store(K_SIMILARITY + which, tl.sum(units * units, 1) / (n * n), mask=which < finished)
        if INT8:
            # Rows that hold no valid key were loaded as zeros, and stay zeros.
            there = real.to(tl.float32)[:, None]
            place = K8 + rows.to(tl.int64)[:, None] * DP + side[None, :]
            if DP > MATRIX:
                low, high = rotate_wide(K, rows, k_row, k_dim, real, matrix, D)
                low -= there * rotated_mean[None, :]
                high -= there * rotated_mean_high[None, :]
                amax = larger_or_nan(largest(tl.abs(low), 1), largest(tl.abs(high), 1))
            else:
                rotated = times_signs(k, matrix) - there * rotated_mean[None, :]
                amax = largest(tl.abs(rotated), 1)
            scale = scale_of(largest(tl.reshape(amax, [GROUPS, KEYS_PER_SCALE]), 1), 127.0)
            inverse = tl.broadcast_to(inverse_or_zero(scale)[:, None], [GROUPS, KEYS_PER_SCALE])
            inverse = tl.reshape(inverse, [TILE])[:, None]
            if DP > MATRIX:
                tl.store(place, round_to_int8(low, inverse))
                tl.store(place + MATRIX, round_to_int8(high, inverse))
            else:
                tl.store(place, round_to_int8(rotated, inverse))
            group = first // KEYS_PER_SCALE + tl.arange(0, GROUPS)
            tl.store(K_SCALE + group, scale * rotation_scale)


@triton.jit
def finish_values(
    V, VALID, V_SCALE, V8, k_len, padded, first, v_row, v_dim,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Transpose TILE tokens of V to 8 bits.

    The attention kernel hands P to the tensor core without moving it between threads; for that, the tokens of every
    sixteen stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """
    dv, t = tl.arange(0, DVP), tl.arange(0, TILE)
    source = first + (t & ~15) + (t & 1) + 2 * ((t >> 2) & 3) + 8 * ((t >> 1) & 1)
    real = visible_rows(VALID, source, k_len, HAS_VALID)
    at = source.to(tl.int64)[:, None]
    v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
    scale = tl.load(V_SCALE + dv, mask=dv < DV, other=0.0)
    v8 = (v.to(tl.float32) * inverse_or_zero(scale)[None, :]).to(tl.float8e4nv)  # the cast saturates
    tl.store(V8 + dv.to(tl.int64)[:, None] * padded + (first + t)[None, :], tl.trans(v8))


@triton.jit
def finish_queries(
    Q, MEAN, HADAMARD, Q_MEANS, Q_SIMILARITY, Q8, Q_SCALE, LSE_TERM,
    q_len, first_row, last_row, rotation_scale, scale, q_row, q_dim,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, SUBS: tl.constexpr,
    JUDGE: tl.constexpr, INT8: tl.constexpr, WRITE_TERM: tl.constexpr,
):  # fmt: skip
    """Block means, self-similarity and int8 copies of one range of query rows."""
    SUB_ROWS: tl.constexpr = BQ // SUBS
    d, t, pick = tl.arange(0, DP), tl.arange(0, ROWS), tl.arange(0, PICKS)
    if INT8:
        matrix = rotation(HADAMARD, DP, Q.dtype.element_ty)
        side = tl.arange(0, matrix.shape[0])
    if WRITE_TERM:
        mean = tl.load(MEAN + d, mask=d < D, other=0.0) * scale
    sums = tl.zeros([PICKS, DP], tl.float32)
    units = tl.zeros([DP], tl.float32)
    for first in range(first_row, last_row, ROWS):
        rows = first + t
        real = rows < q_len
        inside = real[:, None] & (d < D)[None, :]
        q = tl.load(Q + rows.to(tl.int64)[:, None] * q_row + d[None, :] * q_dim, mask=inside, other=0.0)
        start = first % BQ
        block = first // BQ
        finished = tl.where((start + ROWS == BQ) | (first + ROWS >= q_len), SUBS, 0)  # sub-blocks to store
        sums = tl.where(start == 0, 0.0, sums) + sums_of_picked(picks_of(start, SUB_ROWS), q)
        left = q_len - block * BQ - pick * SUB_ROWS
        means = sums * (1.0 / tl.minimum(tl.maximum(left, 1), SUB_ROWS).to(tl.float32))[:, None]
        at = (block.to(tl.int64) * SUBS + pick)[:, None] * D + d[None, :]
        tl.store(Q_MEANS + at, means.to(tl.bfloat16), mask=(pick < finished)[:, None] & (d < D)[None, :])
        if JUDGE:
            units = tl.where(start == 0, 0.0, units) + tl.sum(unit_rows(q.to(tl.float32)), 0)
            n = tl.minimum(q_len - block * BQ, BQ).to(tl.float32)
            tl.store(Q_SIMILARITY + block, tl.sum(units * units, 0) / (n * n), mask=finished > 0)
        if WRITE_TERM:
            tl.store(LSE_TERM + rows, tl.sum(q.to(tl.float32) * mean[None, :], 1), mask=real)
        if INT8:
            place = Q8 + rows.to(tl.int64)[:, None] * DP + side[None, :]
            if DP > MATRIX:
                low, high = rotate_wide(Q, rows, q_row, q_dim, real, matrix, D)
                row_scale = scale_of(larger_or_nan(largest(tl.abs(low), 1), largest(tl.abs(high), 1)), 127.0)
                inverse = inverse_or_zero(row_scale)[:, None]
                tl.store(place, round_to_int8(low, inverse), mask=real[:, None])
                tl.store(place + MATRIX, round_to_int8(high, inverse), mask=real[:, None])
            else:
                rotated = times_signs(q, matrix)
                row_scale = scale_of(largest(tl.abs(rotated), 1), 127.0)
                tl.store(place, round_to_int8(rotated, inverse_or_zero(row_scale)[:, None]), mask=real[:, None])
            tl.store(Q_SCALE + rows, row_scale * rotation_scale, mask=real)


LENGTHS = ["q_len", "k_len", "q_tokens", "k_tokens", "padded", "q_slots", "k_slots", "kv_heads", "group",
           "row_step", "key_step", "items"]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def prepare(
    Q, K, V, VALID, VALID_COUNT, Q_ENDS, K_ENDS, HADAMARD,  # inputs
    ARRIVED, SUMS, PARTIAL, V_MAX, MEAN, ROTATED_MEAN, V_SCALE, V_FINITE,  # per key/value head; ARRIVED: zeros
    Q_MEANS, K_MEANS, Q_SIMILARITY, K_SIMILARITY, Q8, K8, V8, Q_SCALE, K_SCALE, LSE_TERM,  # outputs
    items, q_len, k_len, q_tokens, k_tokens, padded, q_slots, k_slots, kv_heads, group,
    row_step, key_step, rotation_scale, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    Q_SUBS: tl.constexpr, K_SUBS: tl.constexpr, PACKED: tl.constexpr, HAS_VALID: tl.constexpr, JUDGE: tl.constexpr,
    INT8: tl.constexpr, FP8: tl.constexpr, WRITE_TERM: tl.constexpr,
    KIND: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program, one item of one kind. All but the sums need the sums; queries need them for WRITE_TERM only.

    `items` are those of one key/value head; `row_step` and `key_step` are the tokens of one.
    """
    item = tl.program_id(0) % items
    row = (tl.program_id(0) // items).to(tl.int64)
    batch, kv_head = row // kv_heads, row % kv_heads
    first_key, keys = sequence(K_ENDS, batch, k_len, k_tokens, PACKED)
    K += batch * k_batch + kv_head * k_head + first_key * k_row
    V += batch * v_batch + kv_head * v_head + first_key * v_row
    if HAS_VALID:
        VALID += batch * k_len
    kv_row = head_row(batch, kv_head, kv_heads, PACKED)
    first_slot = slot_of(first_key, batch, SEQUENCE_TILE, PACKED) * SEQUENCE_TILE  # where its 8-bit copies start
    key_slot = kv_row * k_slots + first_slot // BK
    filled = tl.cdiv(keys, SEQUENCE_TILE) * SEQUENCE_TILE
    if KIND == 0:
        sum_keys(
            K, V, VALID, SUMS + key_slot * (K_SUBS * D), PARTIAL + (row * items + item) * D,
            V_MAX + (row * items + item) * DV, V_FINITE + key_slot, keys, item * SEGMENTS,
            k_row, k_dim, v_row, v_dim, D, DV, DP, DVP, K_SUBS, BK // K_SUBS, SEGMENTS, HAS_VALID,
        )  # fmt: skip
        tl.debug_barrier()  # the whole program's sums are out before it counts as arrived
        if tl.atomic_add(ARRIVED + row, 1, sem="acq_rel") == items - 1:
            count = tl.load(VALID_COUNT + batch) if HAS_VALID else keys
            finish_sums(
                PARTIAL + row * items * D, V_MAX + row * items * DV, HADAMARD, MEAN + row * D,
                ROTATED_MEAN + row * DP, V_SCALE + row * DV, items, count, D, DV, DP, DVP, INT8, FP8,
            )  # fmt: skip
    elif KIND == 1:
        per_head = items // group
        head = kv_head * group + item // per_head
        begin = (item % per_head) * row_step
        first_row, q_rows = sequence(Q_ENDS, batch, q_len, q_tokens, PACKED)
        q_place = head_row(batch, head, kv_heads * group, PACKED)
        block_place = q_place * q_slots + slot_of(first_row, batch, BQ, PACKED)
        token_place = q_place * q_tokens + first_row
        finish_queries(
            Q + batch * q_batch + head * q_head + first_row * q_row, MEAN + row * D, HADAMARD,
            Q_MEANS + block_place * (Q_SUBS * D), Q_SIMILARITY + block_place, Q8 + token_place * DP,
            Q_SCALE + token_place, LSE_TERM + token_place,
            q_rows, begin, tl.minimum(begin + row_step, q_rows), rotation_scale, scale, q_row, q_dim,
            D, DP, BQ, Q_SUBS, JUDGE, INT8, WRITE_TERM,
        )  # fmt: skip
    elif KIND == 2:
        begin = item * key_step
        place = kv_row * padded + first_slot
        finish_keys(
            K, VALID, SUMS + key_slot * (K_SUBS * D), MEAN + row * D, ROTATED_MEAN + row * DP, HADAMARD,
            K_MEANS + (kv_row * K_SUBS * k_slots + first_slot // BK) * D, K_SIMILARITY + key_slot,
            K8 + place * DP, K_SCALE + place // KEYS_PER_SCALE,
            keys, tl.cdiv(keys, BK), k_slots, begin, tl.minimum(begin + key_step, filled),
            rotation_scale, k_row, k_dim, D, DP, BK, K_SUBS, TILE, HAS_VALID, JUDGE, INT8,
        )  # fmt: skip
    else:
        begin = item * TILE
        if begin < filled:
            finish_values(
                V, VALID, V_SCALE + row * DV, V8 + kv_row * DVP * padded + first_slot,
                keys, padded, begin, v_row, v_dim, DV, DVP, TILE, HAS_VALID,
            )  # fmt: skip
