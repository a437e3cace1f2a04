"""Preparation: one read of Q, K and V, and a sample of K and V before it.

Work is cut into items, a range of tokens of one head. There are five kinds: `sample_head` (the means that smooth keys
and values, the scales of V), `finish_queries`, `finish_keys` (block means, self-similarity, rotated int8 copies),
`finish_values` (finiteness; V transposed to e4m3) and `repair_values` (for the rare head whose values the sampled
scales cannot hold).

Rotation is exact: 16-bit inputs meet a matrix of +-1 in a tensor-core product with float32 sums, and the mean is
rotated once per head instead of once per row. Row and head offsets are 64-bit throughout: a million tokens of many
heads pass 2^31 elements.
"""

import triton
import triton.language as tl

from sparge import quantization as fmt
from sparge.backends.triton.sizes import SAMPLE_PARTS

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits
FP8_MAX = tl.constexpr(fmt.FP8_MAX)
FP8_MAX_BITS = tl.constexpr(0x43E00000)
INFINITY_BITS = tl.constexpr(0x7F800000)
ROWS = tl.constexpr(64)  # query rows of one step
KEYS_PER_SCALE = tl.constexpr(fmt.KEYS_PER_SCALE)
PICKS = tl.constexpr(16)  # most sub-blocks in 64 rows, and the fewest rows a tensor core takes
SAMPLED_TILES = tl.constexpr(fmt.SAMPLED_TILES)
PARTS = tl.constexpr(SAMPLE_PARTS)  # of one head's sample, a program each; the last to arrive adds them up
SAMPLE_ROOM = tl.constexpr(fmt.SAMPLE_ROOM)
SMALLEST_SCALE = tl.constexpr(fmt.SMALLEST_SCALE)
LITTLE_VALUE = tl.constexpr(fmt.LITTLE_VALUE)
LITTLE_MEAN = tl.constexpr(fmt.LITTLE_MEAN)
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
def magnitude_bits(x):
    """|x| as an integer of the same order, infinity and NaN above everything."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
    """Integers in [-127, 127], channels of each 64 in the order a tensor core's result leaves a thread's registers.

    Q and K are permuted alike, which leaves their products unchanged, and every thread stores sixteen bytes at a time,
    next to those of its neighbours.
    """
    ROWS: tl.constexpr = x.shape[0]
    DP: tl.constexpr = x.shape[1]
    TOGETHER: tl.constexpr = DP if DP < 64 else 64
    bits = tl.fma(x, inverse, ROUND).to(tl.int32, bitcast=True)
    integers = tl.reshape(bits.to(tl.int8), [ROWS, DP // TOGETHER, TOGETHER // 8, 4, 2])
    return tl.reshape(tl.permute(integers, (0, 1, 3, 2, 4)), [ROWS, DP])


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
def power_below(x):
    """The largest power of two that is not above x, for positive normal x."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def sample_head(
    K, V, VALID, COUNT, SUM, V_MAX, V_SUM, V_FINITE, part, k_len, blocks, k_row, k_dim, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    HAS_VALID: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One part of one head's sample: the sums of its keys and values, the largest values.

    Softmax does not care which vector is taken from every key, and e4m3 not how far below its limit the numbers are,
    so a sample will do; values that exceed the limit after all are found later, and repaired.
    """
    APART: tl.constexpr = 16  # a thread holds every 16th row or more: it joins them alone, and keeps few registers
    d, dv, t = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, TILE)
    sums = tl.zeros([TILE, DP], tl.float32)
    v_max = tl.zeros([APART, DVP], tl.float32)
    v_sum = tl.zeros([APART, DVP], tl.float32)
    count = tl.zeros([TILE], tl.float32)
    tiles = tl.cdiv(k_len, TILE)
    stride = tl.maximum(tiles // SAMPLED_TILES, 1)
    for tile in range(part * stride, tiles, stride * PARTS):
        token = tile * TILE + t
        real = visible_rows(VALID, token, k_len, HAS_VALID)
        at = token.to(tl.int64)[:, None]
        k = tl.load(K + at * k_row + d[None, :] * k_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        if FP8:
            v = tl.load(V + at * v_row + dv[None, :] * v_dim, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
            v = tl.reshape(finite_or_zero(v.to(tl.float32)), [TILE // APART, APART, DVP])
            v_max = tl.maximum(v_max, tl.max(tl.abs(v), 0))
            v_sum += tl.sum(v, 0)
        sums += finite_or_zero(k.to(tl.float32))
        count += real.to(tl.float32)
    tl.store(COUNT + part, tl.sum(count, 0))
    tl.store(SUM + part * D + d, tl.sum(sums, 0), mask=d < D)
    if FP8:
        tl.store(V_MAX + part * DV + dv, tl.max(v_max, 0), mask=dv < DV)
        tl.store(V_SUM + part * DV + dv, tl.sum(v_sum, 0), mask=dv < DV)
    for first in range(part * 256, blocks, 256 * PARTS):
        block = first + tl.arange(0, 256)
        tl.store(V_FINITE + block, tl.full([256], 1, tl.int8), mask=block < blocks)


@triton.jit
def finish_sample(
    V, VALID, COUNT, SUM, V_MAX, V_SUM, HADAMARD, MEAN, ROTATED_MEAN, V_SCALE, V_MEAN, k_len, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, HAS_VALID: tl.constexpr,
    ROTATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One head: the mean of sampled keys; for each value channel a power of two with room above the sample, and what
    is taken from every value: the sampled mean, but so far from the first token that e4m3 holds the difference; or
    nothing. See quantization.value_scale_and_mean."""
    d, dv, part = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, PARTS)
    count = tl.maximum(tl.sum(tl.load(COUNT + part), 0), 1.0)
    sums = tl.load(SUM + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    tl.store(MEAN + d, tl.sum(sums, 0) / count, mask=d < D)
    if FP8:
        v_max = tl.load(V_MAX + part[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        largest = tl.max(v_max, 0)
        scale = tl.maximum(power_below(largest) * SAMPLE_ROOM, SMALLEST_SCALE)
        tl.store(V_SCALE + dv, scale, mask=dv < DV)
        v_sum = tl.load(V_SUM + part[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        real = visible_rows(VALID, dv * 0, k_len, HAS_VALID) & (dv < DV)
        first = finite_or_zero(tl.load(V + dv * v_dim, mask=real, other=0.0).to(tl.float32))
        mean = tl.sum(v_sum, 0) / count
        apart = (mean / scale - first / scale).to(tl.float8e4nv).to(tl.float32)
        most = tl.sum(largest, 0)
        draws_weight = tl.sum(tl.abs(first), 0) <= LITTLE_VALUE * most
        smooth = draws_weight | (tl.sum(tl.abs(mean), 0) >= LITTLE_MEAN * most)
        tl.store(V_MEAN + dv, tl.where(smooth, first + apart * scale, 0.0), mask=dv < DV)
    if ROTATE:
        tl.debug_barrier()  # the mean is out
        SIDE: tl.constexpr = DP if DP < MATRIX else MATRIX
        i = tl.arange(0, SIDE)
        matrix = tl.load(HADAMARD + i[:, None] * SIDE + i[None, :]).to(tl.float32)
        rotated = tl.sum(tl.load(MEAN + i, mask=i < D, other=0.0)[:, None] * matrix, 0)
        if DP > MATRIX:
            right = tl.sum(tl.load(MEAN + MATRIX + i, mask=i + MATRIX < D, other=0.0)[:, None] * matrix, 0)
            tl.store(ROTATED_MEAN + MATRIX + i, rotated - right)
            rotated += right
        tl.store(ROTATED_MEAN + i, rotated)


@triton.jit
def finish_keys(
    K, VALID, MEAN, ROTATED_MEAN, HADAMARD, K_MEANS, K_SIMILARITY, K8, K_SCALE,
    k_len, blocks, sub_stride, first_key, last_key, rotation_scale, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr,
    HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Block means, self-similarity and int8 copies of one range of keys, TILE at a time."""
    SUB_ROWS: tl.constexpr = BK // SUBS
    SPAN: tl.constexpr = TILE if BK < TILE else BK  # keys after which blocks are complete
    SEGMENTS: tl.constexpr = SPAN // SUB_ROWS if SPAN // SUB_ROWS > PICKS else PICKS
    WHOLE: tl.constexpr = TILE // BK if BK < TILE else 1  # blocks per tile
    TILES: tl.constexpr = BK // TILE if BK > TILE else 1  # tiles per block
    GROUPS: tl.constexpr = TILE // KEYS_PER_SCALE
    d, t, segment = tl.arange(0, DP), tl.arange(0, TILE), tl.arange(0, SEGMENTS)
    mean = tl.load(MEAN + d, mask=d < D, other=0.0)
    if INT8:
        matrix = rotation(HADAMARD, DP, K.dtype.element_ty)
        side = tl.arange(0, matrix.shape[0])
        rotated_mean = tl.load(ROTATED_MEAN + side)
        if DP > MATRIX:
            rotated_mean_high = tl.load(ROTATED_MEAN + MATRIX + side)
    units = tl.zeros([WHOLE, DP], tl.float32)
    members = tl.zeros([WHOLE], tl.float32)
    sums = tl.zeros([SEGMENTS, DP], tl.float32)
    for first in range(first_key, last_key, TILE):
        rows = first + t
        real = visible_rows(VALID, rows, k_len, HAS_VALID)
        inside = real[:, None] & (d < D)[None, :]
        k = tl.load(K + rows.to(tl.int64)[:, None] * k_row + d[None, :] * k_dim, mask=inside, other=0.0)
        start = first % SPAN
        picks = (segment[:, None] == ((start + t) // SUB_ROWS)[None, :]).to(tl.float32)
        if WHOLE > 1:
            # 0 times NaN is NaN: a broken key must not reach the other blocks of the tile.
            finite = tl.abs(k.to(tl.float32)) < float("inf")
            touched = tl.max(tl.where((tl.min(finite.to(tl.int32), 1) == 0)[None, :], picks, 0.0), 1) > 0
            more = tl.where(touched[:, None], float("nan"), sums_of_picked(picks, tl.where(finite, k, 0.0)))
        else:
            more = sums_of_picked(picks, k)
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
            target = K8 + rows.to(tl.int64)[:, None] * DP + side[None, :]
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
                tl.store(target, round_to_int8(low, inverse))
                tl.store(target + MATRIX, round_to_int8(high, inverse))
            else:
                tl.store(target, round_to_int8(rotated, inverse))
            group = first // KEYS_PER_SCALE + tl.arange(0, GROUPS)
            tl.store(K_SCALE + group, scale * rotation_scale)

        # Means of the smoothed sub-blocks, [b, blocks, D] per head.
        sums = more + (0.0 if SPAN == TILE else tl.where(start == 0, 0.0, sums))
        begins = first - start + segment * SUB_ROWS
        if HAS_VALID:
            at = begins[:, None] + tl.arange(0, SUB_ROWS)[None, :]
            counts = tl.sum(tl.load(VALID + at, mask=at < k_len, other=0).to(tl.float32), 1)
        else:
            counts = tl.minimum(tl.maximum(k_len - begins, 0), SUB_ROWS).to(tl.float32)
        share = 1.0 / tl.maximum(counts, 1.0)  # exact for whole sub-blocks
        means = sums * share[:, None] - mean[None, :]
        means = tl.where(tl.abs(means) < float("inf"), means, float("nan"))
        means = tl.where(counts[:, None] > 0, means, 0.0)
        block = begins // BK
        slot = (segment % SUBS).to(tl.int64) * sub_stride + block
        complete = block < tl.where(start + TILE == SPAN, blocks, 0)
        kept = (complete & (segment < SPAN // SUB_ROWS))[:, None] & (d < D)[None, :]
        tl.store(K_MEANS + slot[:, None] * D + d[None, :], means.to(tl.bfloat16), mask=kept)


@triton.jit
def permuted_tokens(first, TILE: tl.constexpr):
    """The attention kernel hands P to the tensor core without moving it between threads; for that, the tokens of every
    sixteen stand in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """
    t = tl.arange(0, TILE)
    return first + (t & ~15) + (t & 1) + 2 * ((t >> 2) & 3) + 8 * ((t >> 1) & 1)


@triton.jit
def load_values(
    V, VALID, token, k_len, v_row, v_dim, DV: tl.constexpr, DVP: tl.constexpr, HAS_VALID: tl.constexpr
):  # fmt: skip
    dv = tl.arange(0, DVP)
    real = visible_rows(VALID, token, k_len, HAS_VALID)
    place = V + token.to(tl.int64)[:, None] * v_row + dv[None, :] * v_dim
    return tl.load(place, mask=real[:, None] & (dv < DV)[None, :], other=0.0)


@triton.jit
def store_values(V8, padded, first, scaled):
    """Transposed, as e4m3; the cast saturates."""
    t, dv = tl.arange(0, scaled.shape[0]), tl.arange(0, scaled.shape[1])
    tl.store(V8 + dv.to(tl.int64)[:, None] * padded + (first + t)[None, :], tl.trans(scaled.to(tl.float8e4nv)))


@triton.jit
def finish_values(
    V, VALID, V_SCALE, V_MEAN, V_FINITE, V_REPAIR, V8, k_len, padded, begin, end, v_row, v_dim,
    DV: tl.constexpr, DVP: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Transpose one range of V to 8 bits, TILE tokens at a time; mark what is not finite or does not fit.

    Eight channels are judged together, which one thread holds: a reduction of the tile would cost more than the rest.
    Tokens that are not there lose the mean as others do: it fits e4m3, and nothing weighs them.
    """
    dv = tl.arange(0, DVP)
    nowhere = tl.zeros([TILE, DVP // 8], tl.int32)
    if FP8:
        inverse = 1.0 / tl.load(V_SCALE + dv, mask=dv < DV, other=1.0)
        mean = tl.load(V_MEAN + dv, mask=dv < DV, other=0.0) * inverse
    following = load_values(V, VALID, permuted_tokens(begin, TILE), k_len, v_row, v_dim, DV, DVP, HAS_VALID)
    for first in range(begin, end, TILE):
        token = permuted_tokens(first, TILE)
        v = following.to(tl.float32)
        following = load_values(V, VALID, token + TILE, k_len, v_row, v_dim, DV, DVP, HAS_VALID)
        if FP8:
            v = v * inverse[None, :] - mean[None, :]  # the product is exact
            store_values(V8, padded, first, v)
        worst = tl.max(tl.reshape(magnitude_bits(v), [TILE, DVP // 8, 8]), 2)
        tl.store(V_FINITE + (token // BK)[:, None] + nowhere, nowhere.to(tl.int8), mask=worst >= INFINITY_BITS)
        if FP8:
            tl.store(V_REPAIR + nowhere, nowhere + 1, mask=worst > FP8_MAX_BITS)


@triton.jit
def repair_values(
    V, VALID, V_SCALE, V_MEAN, V8, k_len, filled, padded, v_row, v_dim,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """One head again, with scales from all its values where the sampled ones are too small, NaN where none is right."""
    dv = tl.arange(0, DVP)
    most = tl.zeros([DVP], tl.int32)
    mean = tl.load(V_MEAN + dv, mask=dv < DV, other=0.0)[None, :]
    for first in range(0, k_len, TILE):
        v = load_values(V, VALID, first + tl.arange(0, TILE), k_len, v_row, v_dim, DV, DVP, HAS_VALID)
        most = tl.maximum(most, tl.max(magnitude_bits(v.to(tl.float32) - mean), 0))
    v_max = most.to(tl.float32, bitcast=True)
    sampled = tl.load(V_SCALE + dv, mask=dv < DV, other=1.0)
    scale = tl.where(v_max < float("inf"), power_below(v_max) / 128.0, float("nan"))
    scale = tl.where(v_max <= FP8_MAX * sampled, sampled, scale)
    tl.debug_barrier()  # every thread has read the sampled scales
    tl.store(V_SCALE + dv, scale, mask=dv < DV)
    for first in range(0, filled, TILE):
        v = load_values(V, VALID, permuted_tokens(first, TILE), k_len, v_row, v_dim, DV, DVP, HAS_VALID)
        scaled = tl.where(scale[None, :] > 0, (v.to(tl.float32) - mean) * inverse_or_zero(scale)[None, :], 0.0)
        store_values(V8, padded, first, scaled)


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
           "row_step", "key_step", "value_step", "items"]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def prepare(
    Q, K, V, VALID, Q_ENDS, K_ENDS, HADAMARD,  # inputs
    ARRIVED, V_REPAIR, COUNT, SUM, V_MAX, V_SUM, ROTATED_MEAN,  # scratch, per key/value head; the first two: see CLEAR
    MEAN, V_SCALE, V_MEAN, V_FINITE,  # outputs, per key/value head
    Q_MEANS, K_MEANS, Q_SIMILARITY, K_SIMILARITY, Q8, K8, V8, Q_SCALE, K_SCALE, LSE_TERM,  # outputs
    items, q_len, k_len, q_tokens, k_tokens, padded, q_slots, k_slots, kv_heads, group,
    row_step, key_step, value_step, rotation_scale, scale,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    Q_SUBS: tl.constexpr, K_SUBS: tl.constexpr, PACKED: tl.constexpr, HAS_VALID: tl.constexpr, JUDGE: tl.constexpr,
    INT8: tl.constexpr, FP8: tl.constexpr, WRITE_TERM: tl.constexpr,
    CLEAR: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program, one item of one kind. Keys and values need the sample, queries for WRITE_TERM only.

    `items` are those of one key/value head; `row_step`, `key_step` and `value_step` are the tokens of one.
    CLEAR: queries come first, and set ARRIVED and V_REPAIR to zeros, which they are otherwise.
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
    padded = padded // SEQUENCE_TILE * SEQUENCE_TILE  # which they are: said for the compiler, who else stores bytes
    value_step = value_step // SEQUENCE_TILE * SEQUENCE_TILE
    first_slot = slot_of(first_key, batch, SEQUENCE_TILE, PACKED) * SEQUENCE_TILE  # where its 8-bit copies start
    key_slot = kv_row * k_slots + first_slot // BK
    filled = tl.cdiv(keys, SEQUENCE_TILE) * SEQUENCE_TILE
    if KIND == 0:
        COUNT += row * PARTS
        SUM += row * PARTS * D
        V_MAX += row * PARTS * DV
        V_SUM += row * PARTS * DV
        sample_head(
            K, V, VALID, COUNT, SUM, V_MAX, V_SUM, V_FINITE + key_slot, item, keys, tl.cdiv(keys, BK),
            k_row, k_dim, v_row, v_dim, D, DV, DP, DVP, TILE, HAS_VALID, FP8,
        )  # fmt: skip
        tl.debug_barrier()  # the whole program's part is out before it counts as arrived
        if tl.atomic_add(ARRIVED + row, 1, sem="acq_rel") == PARTS - 1:
            finish_sample(
                V, VALID, COUNT, SUM, V_MAX, V_SUM, HADAMARD, MEAN + row * D, ROTATED_MEAN + row * DP,
                V_SCALE + row * DV, V_MEAN + row * DV, keys, v_dim, D, DV, DP, DVP, HAS_VALID, INT8, FP8,
            )  # fmt: skip
    elif KIND == 1:
        if CLEAR:
            if item == 0:
                tl.store(ARRIVED + row, 0)
                tl.store(V_REPAIR + row, 0)
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
            K, VALID, MEAN + row * D, ROTATED_MEAN + row * DP, HADAMARD,
            K_MEANS + (kv_row * K_SUBS * k_slots + first_slot // BK) * D, K_SIMILARITY + key_slot,
            K8 + place * DP, K_SCALE + place // KEYS_PER_SCALE,
            keys, tl.cdiv(keys, BK), k_slots, begin, tl.minimum(begin + key_step, filled),
            rotation_scale, k_row, k_dim, D, DP, BK, K_SUBS, TILE, HAS_VALID, JUDGE, INT8,
        )  # fmt: skip
    elif KIND == 3:
        begin = item * value_step
        finish_values(
            V, VALID, V_SCALE + row * DV, V_MEAN + row * DV, V_FINITE + key_slot, V_REPAIR + row,
            V8 + kv_row * DVP * padded + first_slot, keys, padded, begin, tl.minimum(begin + value_step, filled),
            v_row, v_dim, DV, DVP, BK, TILE, HAS_VALID, FP8,
        )  # fmt: skip
    elif tl.load(V_REPAIR + row) != 0:
        repair_values(
            V, VALID, V_SCALE + row * DV, V_MEAN + row * DV, V8 + kv_row * DVP * padded + first_slot,
            keys, filled, padded, v_row, v_dim, DV, DVP, TILE, HAS_VALID,
        )  # fmt: skip
