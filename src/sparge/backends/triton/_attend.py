"""The portable attention kernel: online softmax over the kept blocks of one tile of query rows.

FORMAT 0 multiplies in the input dtype; 1 has int8 scores and 16-bit products; 2 has int8 scores and e4m3 products. Kept
blocks come as descending lists, so those that cut the diagonal or the end come first: the first loop masks, the second
does not and takes PAIR blocks at a time. The softmax lives in base 2, every scale folded into the exponent's argument.
"""

import triton
import triton.language as tl

from sparge.backends.triton._prepare import SEQUENCE_TILE, head_row, sequence, slot_of

GROUP = tl.constexpr(64)  # query rows that share one second-stage decision
LEADING = tl.constexpr(32)  # list entries looked at to find the blocks that need masking
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23
MAGIC_BITS = tl.constexpr(0x4B400000)  # the same, as an integer
P_SHIFT = tl.constexpr(8.0)  # e4m3 probabilities are scaled by 2^8


@triton.jit
def visible_pairs(rows, key, column, q_len, k_len, offset, left, right, VALID, HAS_VALID: tl.constexpr):
    """bool [rows, columns]: which rows see keys key + column; and bool [rows]: which see any."""
    low = rows + (offset - left - key)
    high = tl.minimum(rows + (offset + right), k_len - 1) - key
    high = tl.where(rows < q_len, high, -1)
    seen = (column[None, :] >= low[:, None]) & (column[None, :] <= high[:, None])
    sees = tl.maximum(low, 0) <= tl.minimum(high, column.shape[0] - 1)
    if HAS_VALID:
        seen = seen & (tl.load(VALID + key + column, mask=key + column < k_len, other=0) != 0)[None, :]
        sees = tl.max(seen.to(tl.int32), 1) != 0
    return seen, sees


@triton.jit
def add_broken_values(
    acc, p, seen, V, key, k_len, v_row, v_dim, DV: tl.constexpr, DVP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """acc + p @ v, key by key, for values that are not finite and rows that see them; the rest stays as it is."""
    dv = tl.arange(0, DVP)
    column = tl.arange(0, BK)
    for n in range(tl.minimum(BK, k_len - key)):
        here = column == n
        weight = tl.sum(tl.where(here[None, :], p, 0.0), 1)
        sees = tl.sum((here[None, :] & seen).to(tl.int32), 1) > 0
        value = tl.load(V + (key + n).to(tl.int64) * v_row + dv * v_dim, mask=dv < DV, other=0.0).to(tl.float32)
        broken = ~(tl.abs(value) < float("inf"))
        acc += tl.where(sees[:, None] & broken[None, :], weight[:, None] * value[None, :], 0.0)
    return acc


@triton.jit
def products(
    q, K, K_SCALE, q_scale, key, k_len, k_row, k_dim,
    D: tl.constexpr, DP: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Raw products of a tile with KEYS keys, and the factor of each row.

    Integer sums are below 2^22, so 1.5 * 2^23 + sum is exact in float32 and has the sum in its low bits: starting the
    sum at that number's bit pattern saves the conversion, and the subtraction joins the scaling in one fused operation.
    """
    d, column = tl.arange(0, DP), tl.arange(0, KEYS)
    place = K + key.to(tl.int64) * k_row + column[None, :] * k_row + d[:, None] * k_dim
    if FORMAT == 0:
        if MASK:
            k = tl.load(place, mask=(key + column < k_len)[None, :] & (d < D)[:, None], other=0.0)
        else:
            k = tl.load(place) if D == DP else tl.load(place, mask=(d < D)[:, None], other=0.0)
        raw = tl.dot(q, k, input_precision="tf32x3")
        factor = q_scale
    else:
        k = tl.load(place)
        start = tl.full([q.shape[0], KEYS], MAGIC_BITS, tl.int32)
        raw = tl.dot(q, k, acc=start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
        factor = q_scale * tl.load(K_SCALE + key // 64)
    return raw, factor


@triton.jit
def value_products_8bit(p, V, key, v_row, KEYS: tl.constexpr, DVP: tl.constexpr, products):
    """products + p @ v for KEYS keys, in e4m3."""
    dv, column = tl.arange(0, DVP), tl.arange(0, KEYS)
    p8 = p.to(tl.float8e4nv)
    # Relabels tokens inside each sixteen, as V is stored; no data moves between threads.
    p8 = tl.reshape(tl.permute(tl.reshape(p8, [p.shape[0], KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [p.shape[0], KEYS])
    v = tl.load(V + key + dv[:, None].to(tl.int64) * v_row + column[None, :])
    return tl.dot(p8, tl.trans(v), products)


@triton.jit
def add_values(
    acc, p, V, VALID, key, k_len, v_row, v_dim,
    DV: tl.constexpr, DVP: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, HAS_VALID: tl.constexpr,
    FINITE_ONLY: tl.constexpr,
):  # fmt: skip
    """acc + p @ v for KEYS keys, in the type of V."""
    dv, column = tl.arange(0, DVP), tl.arange(0, KEYS)
    place = V + key.to(tl.int64) * v_row + column[:, None] * v_row + dv[None, :] * v_dim
    if MASK:
        real = key + column < k_len
        if HAS_VALID:
            real = real & (tl.load(VALID + key + column, mask=real, other=0) != 0)
        v = tl.load(place, mask=real[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        v = tl.load(place) if DV == DVP else tl.load(place, mask=(dv < DV)[None, :], other=0.0)
    if FINITE_ONLY:
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision="tf32x3")


@triton.jit
def lane_sums(p):
    """Sums of every eighth column, [rows, 8]: what one thread of a tensor-core tile holds, so nothing is exchanged."""
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@triton.jit
def attend_keys(
    acc, total, best, saw, skipped, q, q_scale, key, second_key, block, rows,
    K, V, K_SCALE, V_FINITE, VALID, lam,
    q_len, k_len, offset, left, right, k_row, k_dim, v_row, v_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr,
    MASK: tl.constexpr, HAS_VALID: tl.constexpr, SECOND: tl.constexpr, CAREFUL: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Fold KEYS keys from `key`, and as many from `second_key` (UNITS 2), into the running (acc, total, best)."""
    BM: tl.constexpr = q.shape[0]
    column = tl.arange(0, KEYS)
    bias: tl.constexpr = 0.0 if FORMAT == 0 else MAGIC
    peak: tl.constexpr = P_SHIFT if FORMAT == 2 else 0.0
    raw, factor = products(q, K, K_SCALE, q_scale, key, k_len, k_row, k_dim, D, DP, KEYS, FORMAT, MASK)
    if UNITS == 2:
        raw_2, factor_2 = products(q, K, K_SCALE, q_scale, second_key, k_len, k_row, k_dim, D, DP, KEYS, FORMAT, MASK)
    if MASK:
        seen, sees = visible_pairs(rows, key, column, q_len, k_len, offset, left, right, VALID, HAS_VALID)
        raw = tl.where(seen, raw, float("-inf"))
        local = tl.where(sees, (tl.max(raw, 1) - bias) * factor, float("-inf"))
        if UNITS == 2:
            seen_2, sees_2 = visible_pairs(
                rows, second_key, column, q_len, k_len, offset, left, right, VALID, HAS_VALID
            )
            raw_2 = tl.where(seen_2, raw_2, float("-inf"))
            local = tl.maximum(local, tl.where(sees_2, (tl.max(raw_2, 1) - bias) * factor_2, float("-inf")))
            sees = sees | sees_2
        saw = saw | sees.to(tl.int32)
    else:
        local = (tl.max(raw, 1) - bias) * factor
        if UNITS == 2:
            local = tl.maximum(local, (tl.max(raw_2, 1) - bias) * factor_2)
    best_now = tl.maximum(best, local)
    shift = best_now
    if MASK:
        shift = tl.where(best_now == float("-inf"), 0.0, best_now)
    wanted = True
    if SECOND:
        # NaN differences (infinite scores, or none but -inf so far) and values that are not finite are always wanted.
        undefined = tl.max((raw != raw).to(tl.int32), 1)
        if UNITS == 2:
            undefined = undefined | tl.max((raw_2 != raw_2).to(tl.int32), 1) | (factor_2 != factor_2).to(tl.int32)
        ask = ~(local - best_now < lam) | (undefined != 0) | (factor != factor)
        group_sees = tl.full([BM // GROUP], 1, tl.int32)
        if MASK:
            ask = ask & sees
            group_sees = tl.max(tl.reshape(sees.to(tl.int32), [BM // GROUP, GROUP]), 1)
        group_wants = tl.max(tl.reshape(ask.to(tl.int32), [BM // GROUP, GROUP]), 1)
        group_wants = group_wants | (tl.load(V_FINITE + block) == 0).to(tl.int32)
        skipped += tl.sum((1 - group_wants) * group_sees, 0)
        row_wants = tl.reshape(tl.broadcast_to(group_wants[:, None], [BM // GROUP, GROUP]), [BM]) != 0
        wanted = tl.max(group_wants, 0) != 0
    if wanted:
        alpha = tl.exp2(best - shift)
        p = tl.exp2(raw * factor[:, None] - (shift + factor * bias - peak)[:, None])
        if MASK:
            p = tl.where(seen, p, 0.0)  # a row whose factor is zero has made NaN of what it does not see
        if SECOND:
            p = tl.where(row_wants[:, None], p, 0.0)
        total = total * alpha[:, None] + lane_sums(p)
        if UNITS == 2:
            p_2 = tl.exp2(raw_2 * factor_2[:, None] - (shift + factor_2 * bias - peak)[:, None])
            if MASK:
                p_2 = tl.where(seen_2, p_2, 0.0)
            if SECOND:
                p_2 = tl.where(row_wants[:, None], p_2, 0.0)
            total += lane_sums(p_2)
        if FORMAT == 2:
            # e4m3 products are summed with few bits: a step's sum joins the float32 total, which costs no more than
            # rescaling that total.
            sums = value_products_8bit(p, V, key, v_row, KEYS, DVP, tl.zeros([BM, DVP], tl.float32))
            if UNITS == 2:
                sums = value_products_8bit(p_2, V, second_key, v_row, KEYS, DVP, sums)
            acc = acc * alpha[:, None] + sums
        else:
            acc = acc * alpha[:, None]
            acc = add_values(acc, p, V, VALID, key, k_len, v_row, v_dim, DV, DVP, KEYS, MASK, HAS_VALID, CAREFUL)
            if UNITS == 2:
                acc = add_values(
                    acc, p_2, V, VALID, second_key, k_len, v_row, v_dim, DV, DVP, KEYS, MASK, HAS_VALID, CAREFUL
                )
            if CAREFUL:
                if tl.load(V_FINITE + block) == 0:
                    if SECOND:
                        seen = seen & row_wants[:, None]
                    acc = add_broken_values(acc, p, seen, V, key, k_len, v_row, v_dim, DV, DVP, KEYS)
                    if UNITS == 2:
                        if SECOND:
                            seen_2 = seen_2 & row_wants[:, None]
                        acc = add_broken_values(acc, p_2, seen_2, V, second_key, k_len, v_row, v_dim, DV, DVP, KEYS)
        best = best_now
    return acc, total, best, saw, skipped


@triton.jit
def holds_broken_values(LISTS, V_FINITE, count):
    """Whether one of the first `count` listed blocks has a value that is not finite."""
    found = 0
    for first in range(0, count, LEADING):
        entry = first + tl.arange(0, LEADING)
        block = tl.load(LISTS + entry, mask=entry < count, other=0)
        found += tl.sum((tl.load(V_FINITE + block, mask=entry < count, other=1) == 0).to(tl.int32), 0)
    return found != 0


LENGTHS = ["heads", "group_size", "q_len", "k_len", "q_tokens", "k_tokens", "k_blocks", "k_slots", "padded",
           "first_block", "blocks_here", "left", "right"]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def attend(
    Q, K, V, Q_SCALE, K_SCALE, V_SCALE, V_MEAN, LSE_TERM, V_FINITE, VALID, Q_ENDS, K_ENDS, LAMBDA,  # inputs
    COUNTS, CUTS, LISTS,
    OUT, LSE, SKIPPED,  # outputs
    scale, heads, group_size, q_len, k_len, q_tokens, k_tokens, k_blocks, k_slots, padded, first_block, blocks_here,
    left, right,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    o_batch, o_head, o_row, o_dim,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr,
    CUTS_FIRST: tl.constexpr, HAS_VALID: tl.constexpr, SECOND: tl.constexpr, WRITE_LSE: tl.constexpr,
    CAREFUL: tl.constexpr, PACKED: tl.constexpr, SOME_HEADS: tl.constexpr, PAIR: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: BM rows of one query block of one head. Heavy causal rows start first.

    A hidden pair has weight 0, and 0 times a NaN value is NaN. The CAREFUL variant is launched after the plain one; its
    tiles return at once unless a masked block holds values that are not finite, and then do the work again without
    touching what a row cannot see.
    """
    TILES: tl.constexpr = BQ // BM
    tiles = blocks_here * TILES
    tile = tiles - 1 - tl.program_id(0) % tiles
    wide = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = wide // heads, wide % heads
    kv_head, kv_heads = head // group_size, heads // group_size
    slot = wide * blocks_here + tile // TILES
    first_row = (first_block + tile // TILES) * BQ + (tile % TILES) * BM
    q_first, q_len = sequence(Q_ENDS, batch, q_len, q_tokens, PACKED)
    k_first, k_len = sequence(K_ENDS, batch, k_len, k_tokens, PACKED)
    if PACKED:
        if first_row >= q_len:
            if SECOND:
                tl.store(SKIPPED + slot * TILES + tile % TILES, 0)
            return
    if SOME_HEADS:
        if tl.load(COUNTS + slot) < 0:  # the head stays as it is
            return
    offset = k_len - q_len
    rows = first_row + tl.arange(0, BM)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    kv_row = head_row(batch, kv_head, kv_heads, PACKED)
    token_place = head_row(batch, head, heads, PACKED) * q_tokens + q_first
    key_slot = slot_of(k_first, batch, SEQUENCE_TILE, PACKED) * SEQUENCE_TILE  # where copies of K and V start
    at = rows.to(tl.int64)
    real = rows < q_len
    Q += batch * q_batch + head * q_head + q_first * q_row
    K += batch * k_batch + kv_head * k_head
    V += batch * v_batch + kv_head * v_head
    if FORMAT == 0:
        K += k_first * k_row
        q = tl.load(Q + at[:, None] * q_row + d[None, :] * q_dim, mask=real[:, None] & (d < D)[None, :], other=0.0)
        q_scale = tl.zeros([BM], tl.float32) + scale
    else:
        K += key_slot * k_row
        q = tl.load(Q + at[:, None] * q_row + d[None, :] * q_dim, mask=real[:, None], other=0)
        q_scale = tl.load(Q_SCALE + token_place + at, mask=real, other=0.0) * scale
        K_SCALE += kv_row * (padded // 64) + key_slot // 64
    V += key_slot * v_dim if FORMAT == 2 else k_first * v_row
    V_FINITE += kv_row * k_slots + key_slot // BK
    if HAS_VALID:
        VALID += batch * k_len
    lam = tl.load(LAMBDA + head) * 1.4426950408889634 if SECOND else 0.0

    acc = tl.zeros([BM, DVP], tl.float32)
    total = tl.zeros([BM, 8], tl.float32)
    best = tl.full([BM], float("-inf"), tl.float32)
    saw = tl.zeros([BM], tl.int32)
    skipped = 0
    count = tl.load(COUNTS + slot)
    LISTS += slot * k_blocks
    if CUTS_FIRST:
        masked = tl.load(CUTS + slot)
    else:
        # Blocks past this one hold a key that the tile's first row, or any row, cannot see.
        last_free = tl.maximum(tl.minimum(k_len, first_row + offset + right + 1), 0) // BK
        lead = tl.arange(0, LEADING)
        masked = tl.sum((tl.load(LISTS + lead, mask=lead < count, other=-1) >= last_free).to(tl.int32), 0)
    masked = tl.where(first_row + BM > q_len, count, masked)
    masked += (count - masked) % PAIR  # what is left over by pairs goes the slower way
    if CAREFUL:
        if not holds_broken_values(LISTS, V_FINITE, masked):
            return
    # One step takes a block, or one of SPLIT parts of it; a step of 128 keys has two key scales, and two units of 64.
    STEP: tl.constexpr = BK // SPLIT
    KEYS: tl.constexpr = 64 if STEP > 64 else STEP
    UNITS: tl.constexpr = STEP // KEYS
    for n in range(masked * SPLIT):
        block = tl.load(LISTS + n // SPLIT)
        key = block * BK + (n % SPLIT) * STEP
        acc, total, best, saw, skipped = attend_keys(
            acc, total, best, saw, skipped, q, q_scale, key, key + (UNITS - 1) * KEYS, block, rows,
            K, V, K_SCALE, V_FINITE, VALID, lam,
            q_len, k_len, offset, left, right, k_row, k_dim, v_row, v_dim,
            D, DV, DP, DVP, KEYS, FORMAT, True, HAS_VALID, SECOND, CAREFUL, UNITS,
        )  # fmt: skip
    for n in range(masked * SPLIT, count * SPLIT, PAIR):
        block = tl.load(LISTS + n // SPLIT)
        key = block * BK + (n % SPLIT) * STEP
        second_key = tl.load(LISTS + n + 1) * BK if PAIR == 2 else key + (UNITS - 1) * KEYS
        acc, total, best, saw, skipped = attend_keys(
            acc, total, best, saw, skipped, q, q_scale, key, second_key, block, rows,
            K, V, K_SCALE, V_FINITE, VALID, lam,
            q_len, k_len, offset, left, right, k_row, k_dim, v_row, v_dim,
            D, DV, DP, DVP, KEYS, FORMAT, False, HAS_VALID, SECOND, False, PAIR * UNITS,
        )  # fmt: skip
    saw = saw | (count > masked).to(tl.int32)
    total = tl.sum(total, 1)
    # A row that saw only scores of -inf divides zero by zero: NaN, as dense attention gives.
    empty = saw == 0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    if FORMAT == 2:
        channel = (batch * kv_heads + kv_head) * DV + dv
        out = out * tl.load(V_SCALE + channel, mask=dv < DV, other=0.0)[None, :]
        out += tl.load(V_MEAN + channel, mask=dv < DV, other=0.0)[None, :]  # what smoothing took from every value
        out = tl.where(empty[:, None], 0.0, out)
    place = OUT + batch * o_batch + head * o_head + (q_first + at)[:, None] * o_row + dv[None, :] * o_dim
    tl.store(place, out.to(OUT.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])
    if WRITE_LSE:
        lse = best + tl.log2(total)
        if FORMAT == 2:
            lse = lse - P_SHIFT
        lse = lse / 1.4426950408889634
        if FORMAT > 0:  # what smoothing took from every score of the row
            lse += tl.load(LSE_TERM + token_place + at, mask=real, other=0.0)
        tl.store(LSE + token_place + at, tl.where(empty, float("-inf"), lse), mask=real)
    if SECOND:
        tl.store(SKIPPED + slot * TILES + tile % TILES, skipped)
