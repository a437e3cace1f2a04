"""Selection: predicted scores, rules and always-kept blocks in registers; one bit per block leaves.

A program owns ROWS sub-rows (ROWS / Q_SUBS query blocks) of one head and walks the key blocks CHUNK at a time. The
first walk computes the blocks' weights: means of exponentials relative to the row's best sub-score, so that no
logarithm is needed; a block more than 2^126 times less likely than the best counts as impossible. The last walk
computes them again with the tensor core, which costs no more than to write and read them.

TopCdf and top-k need a cut-off that no single walk gives. It is found bit by bit: non-negative floats order like
their bits, so 31 walks find it exactly, without a sort. They read what the first walk left, relative to the best so
far, in scratch that stays in L2 (STORED); if there is no room they compute it again too.
"""

import triton
import triton.language as tl

from sparge import probing
from sparge.backends.triton._prepare import SEQUENCE_TILE, head_row, sequence, slot_of

WORD = tl.constexpr(32)
CLAIMED = tl.constexpr(1.0e6)  # beyond every share
NEIGHBOUR = tl.constexpr(probing.NEIGHBOUR)
FULL_LENGTH = tl.constexpr(probing.FULL_LENGTH)


@triton.jit
def sub_row_of(n, SUBS: tl.constexpr, PAIRED: tl.constexpr):
    """Which sub-row of its program a row of the products is.

    A thread of a tensor core holds rows that are eight apart, of sixteen. PAIRED: they belong to one query block, so
    that half of what is added up over a block's sub-rows needs no exchange.
    """
    sub = n
    if PAIRED and SUBS > 1:
        sub = n // 16 * 16 + n % 8 // (SUBS // 2) * SUBS + n % 16 // 8 * (SUBS // 2) + n % (SUBS // 2)
    return sub


@triton.jit
def over_sub_rows(x, SUBS: tl.constexpr, PAIRED: tl.constexpr):
    """Sums of [rows, ...] over the sub-rows of each query block, in the order of sub_row_of."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if PAIRED and SUBS > 1:
        x = tl.sum(tl.reshape(x, [ROWS // 16, 2, 16 // SUBS, SUBS // 2, COLUMNS]), 1)
        x = tl.reshape(tl.sum(x, 2), [ROWS // SUBS, COLUMNS])
    else:
        x = tl.sum(tl.reshape(x, [ROWS // SUBS, SUBS, COLUMNS]), 1)
    return x


@triton.jit
def to_sub_rows(x, SUBS: tl.constexpr, PAIRED: tl.constexpr):
    """A number per query block, [blocks], for each of its sub-rows."""
    BLOCKS: tl.constexpr = x.shape[0]
    if PAIRED and SUBS > 1:
        x = tl.reshape(x, [BLOCKS * SUBS // 16, 1, 16 // SUBS, 1])
        x = tl.broadcast_to(x, [BLOCKS * SUBS // 16, 2, 16 // SUBS, SUBS // 2])
    else:
        x = tl.broadcast_to(x[:, None], [BLOCKS, SUBS])
    return tl.reshape(x, [BLOCKS * SUBS])


@triton.jit
def head_of_part(n, heads, first_head, heads_here, PACKED: tl.constexpr):
    """Which [batch, head] the n-th of a part is: of packed sequences a part has some heads of each."""
    return (n // heads_here) * heads + first_head + n % heads_here if PACKED else first_head + n


@triton.jit
def share_row(bh, batch, head, first_row, share_rows, first_head, BQ: tl.constexpr, PACKED: tl.constexpr):
    """Where a sequence's rows of shares start: first what stands before its first query block, then its blocks."""
    if PACKED:
        start = (head - first_head) * share_rows + slot_of(first_row, batch, BQ, PACKED) + batch
    else:
        start = (bh - first_head).to(tl.int64) * share_rows
    return start


@triton.jit
def probed_shares(SHARES, query_block, q_blocks, first, k_blocks, width, CHUNK: tl.constexpr):
    """What sampled rows give to each block of a chunk, [query blocks, CHUNK]; those of the block before count.

    SHARES points to what stands before query block 0.
    """
    block = first + tl.arange(0, CHUNK)
    inside = (query_block < q_blocks)[:, None] & (block < k_blocks)[None, :]
    place = SHARES + query_block.to(tl.int64)[:, None] * width + block[None, :]
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    return (own + NEIGHBOUR * before) / (1 + NEIGHBOUR)


@triton.jit
def sub_scores(
    query, K_MEANS, FILLED, first, sub, blocks, sub_stride, k_len,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, K_SUBS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    HAS_VALID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Unscaled scores of PART sub-blocks of each block, [rows, PART, CHUNK]; -inf where a sub-block holds no key.

    WHOLE: every sub-block of the chunk is full.
    """
    n = tl.arange(0, PART * CHUNK)
    block, which = first + n % CHUNK, sub + n // CHUNK
    d = tl.arange(0, DP)
    at = (which * sub_stride + n % CHUNK) * D
    place = K_MEANS + first * D + at[None, :] + d[:, None]
    if WHOLE:
        means = tl.load(place) if D == DP else tl.load(place, mask=(d < D)[:, None], other=0.0)
        scores = tl.dot(query, means)
    else:
        inside = block < blocks
        means = tl.load(place, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        if HAS_VALID:
            filled = tl.load(FILLED + which * blocks + block, mask=inside, other=0) != 0
        else:
            filled = block * BK + which * (BK // K_SUBS) < k_len
        scores = tl.where(filled[None, :], tl.dot(query, means), float("-inf"))
    return tl.reshape(scores, [query.shape[0], PART, CHUNK])


@triton.jit
def mean_factor(
    FILLED, first, blocks, k_len,
    BK: tl.constexpr, K_SUBS: tl.constexpr, CHUNK: tl.constexpr, HAS_VALID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """1 / how many sub-blocks of each block hold a key, or 1 where none does."""
    block = first + tl.arange(0, CHUNK)
    if WHOLE:
        count = tl.full([CHUNK], K_SUBS, tl.int32)
    elif HAS_VALID:
        count = tl.zeros([CHUNK], tl.int32)
        for sub in tl.static_range(K_SUBS):
            count += (tl.load(FILLED + sub * blocks + block, mask=block < blocks, other=0) != 0).to(tl.int32)
    else:
        count = tl.minimum(tl.cdiv(tl.maximum(k_len - block * BK, 0), BK // K_SUBS), K_SUBS)
    return 1.0 / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def block_weights(
    query, K_MEANS, FILLED, shift, first, blocks, sub_stride, k_len, scale,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, K_SUBS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    HAS_VALID: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Mean exponential of each block's sub-scores relative to `shift`, [rows, CHUNK]."""
    total = tl.zeros([query.shape[0], CHUNK], tl.float32)
    for part in range(K_SUBS // PART):
        scores = sub_scores(
            query, K_MEANS, FILLED, first, part * PART, blocks, sub_stride, k_len,
            D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, WHOLE,
        )  # fmt: skip
        total += tl.sum(tl.exp2(scores * scale - shift[:, None, None]), 1)
    return total * mean_factor(FILLED, first, blocks, k_len, BK, K_SUBS, CHUNK, HAS_VALID, WHOLE)[None, :]


@triton.jit
def store_weights(WEIGHTS, SHIFTS, first, weight, shift):
    """Weights of a chunk, and what they are relative to."""
    r, n = tl.arange(0, weight.shape[0]), tl.arange(0, weight.shape[1])
    chunk = first // weight.shape[1]
    place = WEIGHTS + chunk * (weight.shape[0] * weight.shape[1])
    tl.store(place + r[:, None] * weight.shape[1] + n[None, :], weight)
    tl.store(SHIFTS + chunk * weight.shape[0] + r, shift)


@triton.jit
def stored_weights(WEIGHTS, SHIFTS, first, shift, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Weights of a chunk relative to `shift`."""
    r, n = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    chunk = first // CHUNK
    weight = tl.load(WEIGHTS + chunk * (ROWS * CHUNK) + r[:, None] * CHUNK + n[None, :])
    return weight * tl.exp2(tl.load(SHIFTS + chunk * ROWS + r) - shift)[:, None]


@triton.jit
def similar_blocks(K_SIMILARITY, first, blocks, theta, CHUNK: tl.constexpr):
    block = first + tl.arange(0, CHUNK)
    return tl.load(K_SIMILARITY + block, mask=block < blocks, other=1.0) >= theta


@triton.jit
def sees_block(
    low, high, first, BEFORE, BK: tl.constexpr, CHUNK: tl.constexpr, HAS_VALID: tl.constexpr
):  # fmt: skip
    """Whether rows that together see keys low ... high see some valid key of each block, [rows, CHUNK]."""
    start = (first + tl.arange(0, CHUNK)) * BK
    begin = tl.maximum(low[:, None], start[None, :])
    end = tl.minimum(high[:, None], start[None, :] + BK)
    seen = begin < end
    if HAS_VALID:
        seen = seen & (tl.load(BEFORE + end, mask=seen, other=0) > tl.load(BEFORE + begin, mask=seen, other=0))
    return seen


@triton.jit
def pack_words(keep):
    """bool [n, CHUNK] to int32 [n, CHUNK / 32]."""
    n: tl.constexpr = keep.shape[0]
    bits = tl.reshape(keep.to(tl.int32), [n, keep.shape[1] // WORD, WORD]) << tl.arange(0, WORD)[None, None, :]
    return tl.sum(bits, 2)


@triton.jit
def measure_chunk(
    best, total, peak, visible, query, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, WEIGHTS, SHIFTS, theta,
    first, k_blocks, k_slots, k_len, scale,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, K_SUBS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Fold a chunk of blocks into each row's best sub-score, and total and largest weight relative to it.

    WHOLE: every row sees every key of the chunk, and every block is judged by its mean.
    """
    ROWS: tl.constexpr = query.shape[0]
    if WHOLE:
        visible += CHUNK
    else:
        judged = sees_block(low, high, first, BEFORE, BK, CHUNK, HAS_VALID)
        visible += tl.sum(judged.to(tl.int32), 1)
        if JUDGE:
            judged = judged & similar_blocks(K_SIMILARITY, first, k_blocks, theta, CHUNK)[None, :]
    weight = tl.zeros([ROWS, CHUNK], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    for part in range(K_SUBS // PART):
        scores = sub_scores(
            query, K_MEANS, FILLED, first, part * PART, k_blocks, k_slots, k_len,
            D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, WHOLE,
        )  # fmt: skip
        highest = tl.max(scores, 1)
        if not WHOLE:
            highest = tl.where(judged, highest, float("-inf"))
        best_now = tl.maximum(best, tl.max(highest, 1) * scale)
        shift = tl.where(best_now == float("-inf"), 0.0, best_now)
        shrink = tl.exp2(best - shift)
        total, peak = total * shrink, peak * shrink
        weight = weight * shrink[:, None] + tl.sum(tl.exp2(scores * scale - shift[:, None, None]), 1)
        best = best_now
    weight = weight * mean_factor(FILLED, first, k_blocks, k_len, BK, K_SUBS, CHUNK, HAS_VALID, WHOLE)[None, :]
    if not WHOLE:
        weight = tl.where(judged, weight, 0.0)
    if STORED:
        store_weights(WEIGHTS, SHIFTS, first, weight, shift)
    return best, total + tl.sum(weight, 1), tl.maximum(peak, tl.max(weight, 1)), visible


@triton.jit
def keep_chunk(
    query, cut, broken, shift, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, V_FINITE, K_PROTECTED,
    WEIGHTS, SHIFTS, SHARES, theta, row_kept, block_top, block_bottom, query_block, to_share, asked,
    first, q_blocks, k_blocks, k_slots, width, k_len, left, right, sinks, scale,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, Q_SUBS: tl.constexpr, K_SUBS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, PROTECT: tl.constexpr,
    RIGHT_EDGE: tl.constexpr, USE_PROBE: tl.constexpr, STORED: tl.constexpr, PAIRED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Which blocks of a chunk are kept, packed: what any sub-row claims, and what is always kept."""
    if STORED:
        weight = stored_weights(WEIGHTS, SHIFTS, first, shift, query.shape[0], CHUNK)
    else:
        weight = block_weights(
            query, K_MEANS, FILLED, shift, first, k_blocks, k_slots, k_len, scale,
            D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, WHOLE,
        )  # fmt: skip
    claimed = ~(weight < cut[:, None]) | broken[:, None]
    # Rows without a total, and blocks that are not judged, add nothing.
    share = weight * to_share[:, None] if USE_PROBE else tl.zeros_like(weight)
    if not WHOLE:
        judged = sees_block(low, high, first, BEFORE, BK, CHUNK, HAS_VALID)
        if JUDGE:
            similar = similar_blocks(K_SIMILARITY, first, k_blocks, theta, CHUNK)
            judged = judged & similar[None, :]
        claimed = claimed & judged
        share = tl.where(judged, share, 0.0)
    share = over_sub_rows(tl.where(claimed, CLAIMED, share), Q_SUBS, PAIRED)
    if USE_PROBE:
        share += probed_shares(SHARES, query_block, q_blocks, first, k_blocks, width, CHUNK)
    block = first + tl.arange(0, CHUNK)
    inside = block < k_blocks
    column_kept = (block < sinks) | (tl.load(V_FINITE + block, mask=inside, other=1) == 0)
    if PROTECT:
        column_kept = column_kept | (tl.load(K_PROTECTED + block, mask=inside, other=0) != 0)
    if JUDGE and not WHOLE:
        column_kept = column_kept | ~similar
    keep = (share > asked) | column_kept[None, :] | row_kept[:, None]
    if RIGHT_EDGE:
        start = (block * BK)[None, :]
        stop = tl.minimum(start + BK, k_len)
        keep = keep | ((block_bottom[:, None] + right >= start) & (block_top[:, None] + right < stop))
    if not WHOLE:  # what some row of the query block sees: their keys are one stretch
        low, high = tl.maximum(block_top - left, 0), tl.minimum(block_bottom + right + 1, k_len)
        keep = keep & sees_block(low.to(tl.int32), high.to(tl.int32), first, BEFORE, BK, CHUNK, HAS_VALID)
    return pack_words(keep)


LENGTHS = ["heads", "kv_heads", "q_len", "k_len", "q_tokens", "k_tokens", "q_slots", "k_slots", "words", "left",
           "right", "sinks", "tiles", "chunks", "share_rows", "first_head", "heads_here", "first_row", "rows",
           "k_blocks", "bits_batch", "bits_head"]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def select(
    Q_MEANS, K_MEANS, FILLED, BEFORE, UNBROKEN, Q_ENDS, K_ENDS,  # inputs; BEFORE and UNBROKEN: as in Visibility
    V_FINITE, Q_SIMILARITY, K_SIMILARITY, Q_PROTECTED, K_PROTECTED,
    THRESHOLD, GAP, CDF, TOPK, PROBE, THETA,  # settings per query head
    WEIGHTS, SHIFTS,  # scratch: float32 [programs, chunks, ROWS, CHUNK], [programs, chunks, ROWS]
    SHARES,  # as the probe left them
    BITS,  # output: int32 [BH, query blocks, words]
    heads, kv_heads, q_len, k_len, q_tokens, k_tokens, q_slots, k_slots, words, left, right, sinks, tiles, chunks,
    share_rows, first_head, heads_here, scale,
    D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    Q_SUBS: tl.constexpr, K_SUBS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    USE_THRESHOLD: tl.constexpr, USE_GAP: tl.constexpr, USE_CDF: tl.constexpr, USE_TOPK: tl.constexpr,
    USE_PROBE: tl.constexpr,
    RIGHT_EDGE: tl.constexpr, HAS_VALID: tl.constexpr, JUDGE: tl.constexpr, PROTECT: tl.constexpr,
    PACKED: tl.constexpr, KEEP_ALL: tl.constexpr, STORED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """One program: ROWS sub-rows of one head."""
    QUERY_BLOCKS: tl.constexpr = ROWS // Q_SUBS
    SUB_ROWS: tl.constexpr = BQ // Q_SUBS
    tile = tl.program_id(0) % tiles
    bh = head_of_part(tl.program_id(0) // tiles, heads, first_head, heads_here, PACKED)
    head = bh % heads
    batch = (bh // heads).to(tl.int64)
    kv_head = head // (heads // kv_heads)
    first_row, q_len = sequence(Q_ENDS, batch, q_len, q_tokens, PACKED)
    first_key, k_len = sequence(K_ENDS, batch, k_len, k_tokens, PACKED)
    if PACKED:
        if tile * QUERY_BLOCKS * BQ >= q_len:
            return
    q_blocks, k_blocks, offset = tl.cdiv(q_len, BQ), tl.cdiv(k_len, BK), k_len - q_len
    q_place = head_row(batch, head, heads, PACKED) * q_slots + slot_of(first_row, batch, BQ, PACKED)
    key_slot = slot_of(first_key, batch, SEQUENCE_TILE, PACKED) * SEQUENCE_TILE // BK
    kv_row = head_row(batch, kv_head, kv_heads, PACKED)
    K_MEANS += (kv_row * K_SUBS * k_slots + key_slot) * D
    V_FINITE += kv_row * k_slots + key_slot
    if JUDGE:
        K_SIMILARITY += kv_row * k_slots + key_slot
    if HAS_VALID:
        FILLED += batch * K_SUBS * k_blocks
        BEFORE += batch * (k_len + 1)

    if STORED:
        WEIGHTS += tl.program_id(0).to(tl.int64) * chunks * (ROWS * CHUNK)
        SHIFTS += tl.program_id(0).to(tl.int64) * chunks * ROWS

    # This program's sub-rows, and the keys each may see.
    sub_row = tile * ROWS + sub_row_of(tl.arange(0, ROWS), Q_SUBS, PAIRED)
    top = sub_row * SUB_ROWS
    exists = top < q_len
    bottom = tl.minimum(top + SUB_ROWS, q_len) - 1
    low = tl.maximum(top + offset - left, 0).to(tl.int32)
    high = tl.minimum(bottom + offset + right + 1, k_len).to(tl.int32)
    high = tl.where(exists, high, 0)
    d = tl.arange(0, DP)
    at = q_place * Q_SUBS + sub_row
    real = (sub_row < q_blocks * Q_SUBS)[:, None] & (d < D)[None, :]
    query = tl.load(Q_MEANS + at[:, None] * D + d[None, :], mask=real, other=0.0)
    theta = tl.load(THETA + head) if JUDGE else 0.0

    # First walk: total and largest weight, relative to the best sub-score so far.
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.zeros([ROWS], tl.float32)
    visible = tl.zeros([ROWS], tl.int32)
    begin = (tl.min(low, 0) // BK) // CHUNK * CHUNK
    end = tl.cdiv(tl.max(high, 0), BK)
    # Chunks before this one are seen whole by every row.
    edge = begin
    if not JUDGE:
        seen_by_all = tl.min(high, 0)
        if HAS_VALID:
            seen_by_all = tl.minimum(seen_by_all, tl.load(UNBROKEN + batch))
        edge = tl.maximum(tl.where(tl.max(low, 0) == 0, seen_by_all // (CHUNK * BK) * CHUNK, begin), begin)
    for first in range(begin, edge, CHUNK):
        best, total, peak, visible = measure_chunk(
            best, total, peak, visible, query, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, WEIGHTS, SHIFTS, theta,
            first, k_blocks, k_slots, k_len, scale, D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, JUDGE, STORED, True,
        )  # fmt: skip
    for first in range(edge, end, CHUNK):
        best, total, peak, visible = measure_chunk(
            best, total, peak, visible, query, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, WEIGHTS, SHIFTS, theta,
            first, k_blocks, k_slots, k_len, scale, D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, JUDGE, STORED, False,
        )  # fmt: skip
    if STORED:
        tl.debug_barrier()  # every thread's weights are written before another reads them
    shift = tl.where(best == float("-inf"), 0.0, best)
    # A sum that is not finite cannot be judged: everything the row sees is kept.
    broken = ~(total < float("inf"))

    # Cut-offs: a weight that is not below its cut-off is kept.
    cut = peak * 0.0 if KEEP_ALL else peak
    if USE_THRESHOLD:
        # "exceeds": not below the next float up.
        exceeds = (total * tl.load(THRESHOLD + head)).to(tl.int32, bitcast=True) + 1
        cut = tl.minimum(cut, exceeds.to(tl.float32, bitcast=True))
    if USE_GAP:
        cut = tl.minimum(cut, peak * tl.exp2(-tl.load(GAP + head) * 1.4426950408889634))
    if USE_CDF or USE_TOPK:
        # Bit by bit: the largest cut whose mass exceeds the share (cdf), that leaves at least k blocks (top-k).
        mass_cut = tl.zeros([ROWS], tl.int32)
        count_cut = tl.zeros([ROWS], tl.int32)
        share = tl.load(CDF + head) * total if USE_CDF else total
        k = visible
        if USE_TOPK:
            k = tl.ceil(visible.to(tl.float64) * tl.load(TOPK + head) - 1e-6).to(tl.int32)
            k = tl.maximum(k, 1)
        for step in range(31):
            digit = 1 << (30 - step)
            mass = tl.zeros([ROWS], tl.float32)
            count = tl.zeros([ROWS], tl.int32)
            for first in range(begin, end, CHUNK):
                judged = sees_block(low, high, first, BEFORE, BK, CHUNK, HAS_VALID)
                if JUDGE:
                    judged = judged & similar_blocks(K_SIMILARITY, first, k_blocks, theta, CHUNK)[None, :]
                if STORED:
                    weight = stored_weights(WEIGHTS, SHIFTS, first, shift, ROWS, CHUNK)
                else:
                    weight = block_weights(
                        query, K_MEANS, FILLED, shift, first, k_blocks, k_slots, k_len, scale,
                        D, DP, BK, K_SUBS, PART, CHUNK, HAS_VALID, False,
                    )  # fmt: skip
                bits = weight.to(tl.int32, bitcast=True)
                if USE_CDF:
                    mass += tl.sum(tl.where(judged & (bits >= (mass_cut + digit)[:, None]), weight, 0.0), 1)
                if USE_TOPK:
                    count += tl.sum((judged & (bits >= (count_cut + digit)[:, None])).to(tl.int32), 1)
            mass_cut = tl.where(mass > share, mass_cut + digit, mass_cut)
            count_cut = tl.where(count >= k, count_cut + digit, count_cut)
        if USE_CDF:
            everything = tl.load(CDF + head) >= 1.0
            # Everything at or above this cut is too much: the blocks that tie there are left out together.
            cut = tl.minimum(cut, tl.where(everything, 0.0, (mass_cut + 1).to(tl.float32, bitcast=True)))
        if USE_TOPK:
            cut = tl.minimum(cut, count_cut.to(tl.float32, bitcast=True))

    # Last walk: compare, let any sub-row claim the block, add what is always kept, pack.
    query_block = tile * QUERY_BLOCKS + tl.arange(0, QUERY_BLOCKS)
    to_share, asked, width = total, 0.0, words * WORD
    if USE_PROBE:
        # Shares are means over the sub-rows that judge anything; twice the mean of both kinds is compared.
        judges = ((total > 0) & ~broken).to(tl.float32)
        mates = tl.reshape(over_sub_rows(judges[:, None], Q_SUBS, PAIRED), [QUERY_BLOCKS])
        mates = to_sub_rows(mates, Q_SUBS, PAIRED)
        to_share = tl.where(judges > 0, 1.0 / (tl.where(judges > 0, total, 1.0) * tl.maximum(mates, 1.0)), 0.0)
        valid_keys = tl.load(BEFORE + k_len) if HAS_VALID else k_len  # padding must not count
        length = tl.maximum(valid_keys, FULL_LENGTH).to(tl.float32)
        asked = 2 * tl.load(PROBE + head) / tl.sqrt(length / FULL_LENGTH)
        SHARES += share_row(bh, batch, head, first_row, share_rows, first_head, BQ, PACKED) * width
    block_top = query_block * BQ + offset
    block_bottom = tl.minimum((query_block + 1) * BQ, q_len) - 1 + offset
    row_kept = tl.zeros([QUERY_BLOCKS], tl.int1)
    if JUDGE:
        row_kept = row_kept | ~(
            tl.load(Q_SIMILARITY + q_place + query_block, mask=query_block < q_blocks, other=1.0) >= theta
        )
    if PROTECT:
        row_kept = row_kept | (tl.load(Q_PROTECTED + query_block, mask=query_block < q_blocks, other=0) != 0)
    place = BITS + (q_place + query_block) * words
    there = (query_block < q_blocks)[:, None]
    word = tl.arange(0, CHUNK // WORD)[None, :]
    for first in range(begin, edge, CHUNK):
        packed = keep_chunk(
            query, cut, broken, shift, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, V_FINITE, K_PROTECTED,
            WEIGHTS, SHIFTS, SHARES, theta, row_kept, block_top, block_bottom, query_block, to_share, asked,
            first, q_blocks, k_blocks, k_slots, width, k_len, left, right, sinks, scale,
            D, DP, BK, Q_SUBS, K_SUBS, PART, CHUNK, HAS_VALID, JUDGE, PROTECT, RIGHT_EDGE, USE_PROBE, STORED, PAIRED,
            True,
        )  # fmt: skip
        tl.store(place[:, None] + (first // WORD + word), packed, mask=there)
    for first in range(edge, end, CHUNK):
        packed = keep_chunk(
            query, cut, broken, shift, low, high, K_MEANS, FILLED, BEFORE, K_SIMILARITY, V_FINITE, K_PROTECTED,
            WEIGHTS, SHIFTS, SHARES, theta, row_kept, block_top, block_bottom, query_block, to_share, asked,
            first, q_blocks, k_blocks, k_slots, width, k_len, left, right, sinks, scale,
            D, DP, BK, Q_SUBS, K_SUBS, PART, CHUNK, HAS_VALID, JUDGE, PROTECT, RIGHT_EDGE, USE_PROBE, STORED, PAIRED,
            False,
        )  # fmt: skip
        tl.store(place[:, None] + (first // WORD + word), packed, mask=there & (first // WORD + word < words))
    # Blocks that no row sees.
    nothing = tl.zeros([QUERY_BLOCKS, CHUNK // WORD], tl.int32)
    for first in range(0, begin // WORD, CHUNK // WORD):
        tl.store(place[:, None] + (first + word), nothing, mask=there)
    for first in range(tl.cdiv(tl.maximum(end, begin), CHUNK) * (CHUNK // WORD), words, CHUNK // WORD):
        tl.store(place[:, None] + (first + word), nothing, mask=there & (first + word < words))


@triton.jit
def holds_hidden(block, batch, top, bottom, k_len, left, right, BEFORE, BK: tl.constexpr, HAS_VALID: tl.constexpr):
    """Whether some row at positions `top` to `bottom` cannot see some key of a block."""
    start = block * BK
    stop = start + BK
    hidden = (stop > tl.minimum(k_len, top + right + 1)) | (start < bottom - left)
    if HAS_VALID:
        whole = (block >= 0) & (stop <= k_len)
        valid = BEFORE + batch * (k_len + 1)
        filled = tl.load(valid + stop, mask=whole, other=0) - tl.load(valid + start, mask=whole, other=0)
        hidden = hidden | (filled != BK)
    return hidden


@triton.jit
def holds_seen(block, batch, top, bottom, k_len, left, right, BEFORE, BK: tl.constexpr, HAS_VALID: tl.constexpr):
    """Whether some row at positions `top` to `bottom` sees some key of a block; none of one before the first."""
    start = tl.maximum(block * BK, top - left)
    stop = tl.minimum(block * BK + BK, tl.minimum(bottom + right + 1, k_len))
    seen = (block >= 0) & (start < stop)
    if HAS_VALID:
        valid = BEFORE + batch * (k_len + 1)
        seen = seen & (tl.load(valid + stop, mask=seen, other=0) > tl.load(valid + start, mask=seen, other=0))
    return seen


@triton.jit
def drawn_if_any(WANTED, heads):
    """What a program draws first: a tile if any head is wanted, else a number beyond all tiles, and so no other."""
    wanted = 0
    for first in range(0, heads, 128):
        head = first + tl.arange(0, 128)
        wanted += tl.sum(tl.load(WANTED + head, mask=head < heads, other=0).to(tl.int32), 0)
    return tl.where(wanted == 0, 1 << 30, 0)


@triton.jit(do_not_specialize=LENGTHS)
def expand(
    BITS, Q_ENDS, K_ENDS, BEFORE, WANTED,  # inputs: int32 [BH, query blocks, words]; as for select; int8 [BH]
    COUNTS, CUTS, LISTS,  # outputs: [BH, rows] and counters behind; [BH, rows]; [BH, rows, key blocks]
    heads, q_len, k_len, q_tokens, k_tokens, k_blocks, words, first_row, rows, bits_batch, bits_head, left, right,
    BQ: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr, CUTS_FIRST: tl.constexpr,
    IN_ORDER: tl.constexpr, HAS_VALID: tl.constexpr, SOME_HEADS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """The kept key blocks of one query block, last first. BITS may be shared by batch entries or heads (stride 0).

    CUTS_FIRST: blocks with a key that some row cannot see come before all others; CUTS says how many they are.
    IN_ORDER: nothing changes places, as the second stage asks; CUTS then counts all up to the last of those blocks.
    SOME_HEADS: instead of BITS every block that holds a visible pair, for heads that are WANTED; a count of -1 says
    that the rows of others stay as they are.
    COUNTERS: the first is what programs draw first, others are 0.
    """
    row = tl.program_id(0) % rows
    bh = (tl.program_id(0) // rows).to(tl.int64)
    if tl.program_id(0) == 0:
        first_draw = 0
        if SOME_HEADS:
            first_draw = drawn_if_any(WANTED, tl.num_programs(0) // rows)
        counter = tl.arange(0, COUNTERS)
        tl.store(COUNTS + tl.num_programs(0) + counter, tl.where(counter == 0, first_draw, 0))
    if SOME_HEADS:
        if tl.load(WANTED + bh) == 0:
            tl.store(COUNTS + bh * rows + row, -1)
            return
    batch, head = bh // heads, bh % heads
    first, q_len = sequence(Q_ENDS, batch, q_len, q_tokens, PACKED)
    _, k_len = sequence(K_ENDS, batch, k_len, k_tokens, PACKED)
    block_row = first_row + row
    if PACKED:
        if block_row * BQ >= q_len:
            return
    top = block_row * BQ + k_len - q_len
    bottom = tl.minimum(block_row * BQ + BQ, q_len) - 1 + k_len - q_len
    BITS += batch * bits_batch + head * bits_head + (slot_of(first, batch, BQ, PACKED) + block_row) * words
    slot = bh * rows + row
    LISTS += slot * k_blocks
    count = 0
    cuts = 0
    for chosen in tl.static_range(2 if CUTS_FIRST and not IN_ORDER else 1):
        for first_listed in range(0, k_blocks, TILE):
            block = k_blocks - 1 - first_listed - tl.arange(0, TILE)
            if SOME_HEADS:
                kept = holds_seen(block, batch, top, bottom, k_len, left, right, BEFORE, BK, HAS_VALID)
            else:
                word = tl.load(BITS + block // WORD, mask=block >= 0, other=0)
                kept = (((word >> (block % WORD)) & 1) != 0) & (block >= 0)
            if CUTS_FIRST:
                cut = holds_hidden(block, batch, top, bottom, k_len, left, right, BEFORE, BK, HAS_VALID)
                if not IN_ORDER:
                    kept = kept & (cut if chosen == 0 else ~cut)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(LISTS + place, block, mask=kept)
            count += tl.sum(kept.to(tl.int32), 0)
            if CUTS_FIRST and chosen == 0:
                cuts = tl.maximum(cuts, tl.max(tl.where(kept & cut, place + 1, 0), 0))
    if CUTS_FIRST:
        tl.store(CUTS + slot, cuts)
    tl.store(COUNTS + slot, count)
