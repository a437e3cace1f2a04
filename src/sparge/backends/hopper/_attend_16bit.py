"""Block-sparse attention for sm_90 in Gluon: 16-bit values, with int8 scores or 16-bit ones.

The same tiles, lists and hand-overs as in `_attend`, for two consumer warpgroups. The tensor core sums 16-bit products
in float32, so nothing is promoted; probabilities need no headroom, so that a row's best may lag by several bits.
Everything is read by boxes of four dimensions, [batch, head, token, channel]: whatever the strides, what lies beyond a
head's end reads as 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from sparge.backends.hopper._attend import (
    END,
    HIDDEN,
    LANES,
    LENGTHS,
    NOTHING,
    ROW,
    ROWS,
    UNIT,
    Problem,
    barriers,
    followed,
    halves,
    hand_out,
    hidden_pairs,
    keys_of,
    lane_sum,
    load_box,
    look_up,
    needed_units,
    next_tile,
    note_skips,
    per_lane,
    probabilities,
    queries_again,
    ring,
    second_is_real,
    set_word,
    shrink_code,
    shrink_operands,
    some_shown,
    tile_of,
    wanted_units,
)

SLACK = gl.constexpr(8.0)  # bits that a score may exceed the row's best by before that follows: 2^8 is small in 16 bits


@aggregate
class Shared:
    """Shared memory, and a pair of barriers for each thing that is handed over in it."""

    q: gl.shared_memory_descriptor  # [2 WGS, 1, 1, 64, D]
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, 128, D]
    v: gl.shared_memory_descriptor  # [2 STAGES, 1, 1, 64, DVP]
    rows: gl.shared_memory_descriptor  # [WGS, 64, DVP]: on their way out
    votes: gl.shared_memory_descriptor  # [WGS, 256]: of the second stage
    ticket: gl.shared_memory_descriptor  # [8, 1]
    slots: gl.shared_memory_descriptor  # [2, 1]: 0, 1
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ticket_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, rows, votes, ticket, slots, q_full, q_empty, full, empty, ticket_full
    ):  # fmt: skip
        self.q, self.k, self.v, self.rows, self.votes = q, k, v, rows, votes
        self.ticket, self.slots = ticket, slots
        self.q_full, self.q_empty, self.full, self.empty = q_full, q_empty, full, empty
        self.ticket_full = ticket_full


@aggregate
class Step:
    """Two units of 64 keys: where they begin, their scales, and which the second stage may not skip (1, 2: a, b).

    The second may not be real.
    """

    a_key: gl.tensor
    b_key: gl.tensor
    b_real: gl.tensor
    a_scale: gl.tensor
    b_scale: gl.tensor
    needed: gl.tensor

    @gluon.constexpr_function
    def __init__(self, a_key, b_key, b_real, a_scale, b_scale, needed):
        self.a_key, self.b_key, self.b_real = a_key, b_key, b_real
        self.a_scale, self.b_scale, self.needed = a_scale, b_scale, needed


@gluon.jit
def step_of(t, step, p, MASK: gl.constexpr):
    a_key, b_key = keys_of(t, step, p.BK, MASK)
    scales = p.K_SCALE + (t.at.kv_row * p.padded + t.at.key) // UNIT
    a_scale = gl.load(scales + a_key // UNIT)
    b_scale = gl.load(scales + b_key // UNIT)
    if MASK:  # keys of scale 0 are 0 at any scale, but what hides them must stay below every score
        a_scale = gl.where(a_scale == 0, 1.0, a_scale)
        b_scale = gl.where(b_scale == 0, 1.0, b_scale)
    b_real = second_is_real(t, step, p.BK, False)  # read where steps mask
    return Step(a_key, b_key, b_real, a_scale, b_scale, needed_units(t, (a_key, b_key), p))


# ---- the producer


@gluon.jit
def load_step(k_boxes, v_boxes, c, batch, head, a_key, b_key, STAGE_BYTES: gl.constexpr, p, s):
    """K and V of two units of 64 keys, into a stage that every consumer has left."""
    stage, parity = ring(c, p)
    full = s.full.index(stage)
    mbarrier.wait(s.empty.index(stage), parity ^ 1)
    mbarrier.expect(full, STAGE_BYTES)
    load_box(k_boxes, [batch, head, a_key, 0], full, s.k.index(stage).slice(0, UNIT, 2))
    load_box(k_boxes, [batch, head, b_key, 0], full, s.k.index(stage).slice(UNIT, UNIT, 2))
    load_box(v_boxes, [batch, head, a_key, 0], full, s.v.index(2 * stage))
    load_box(v_boxes, [batch, head, b_key, 0], full, s.v.index(2 * stage + 1))


@gluon.jit
def producer(q_boxes, k_boxes, v_boxes, Q_BYTES: gl.constexpr, STAGE_BYTES: gl.constexpr, SOME_HEADS: gl.constexpr,
             p, s):  # fmt: skip
    c = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < p.tiles:
        count, masked = look_up(tile, p)
        wanted = True
        if SOME_HEADS:
            wanted = count >= 0  # else the head stays as it is
        if wanted:
            hand_out(tile, END, count, masked, turn, s)
            t = tile_of(tile, 0, count, masked, p)
            batch = t.at.bh // p.heads
            head = t.at.bh % p.heads
            full = s.q_full.index(turn & 1)
            mbarrier.expect(full, Q_BYTES)
            for w in gl.static_range(p.WGS):
                load_box(q_boxes, [batch, head, t.first_row + w * ROWS, 0], full, s.q.index((turn & 1) * p.WGS + w))
            kv_head = head // p.group
            for step in range(t.masked_steps):
                a_key, b_key = keys_of(t, step, p.BK, True)
                load_step(k_boxes, v_boxes, c, batch, kv_head, a_key, b_key, STAGE_BYTES, p, s)
                c += 1
            for step in range(t.masked_steps, t.steps):
                a_key, b_key = keys_of(t, step, p.BK, False)
                load_step(k_boxes, v_boxes, c, batch, kv_head, a_key, b_key, STAGE_BYTES, p, s)
                c += 1
            turn += 1
        tile = gl.atomic_add(p.TICKETS, 1) + gl.num_programs(0)
    hand_out(END, END, 0, 0, turn, s)


# ---- the consumers


@gluon.jit
def start_scores(q, stage, INT8: gl.constexpr, p, s):
    """Raw scores of a stage's 128 keys, under way."""
    k = s.k.index(stage).reshape([2 * UNIT, p.D]).permute((1, 0))
    if INT8:
        nothing = gl.zeros([ROWS, 2 * UNIT], gl.int32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * UNIT, 32]))
    else:
        nothing = gl.zeros([ROWS, 2 * UNIT], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * UNIT, 16]))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def factors_of(x, q_scale, INT8: gl.constexpr):
    """What raw scores are worth, row by row, in a step's two units."""
    if INT8:
        return q_scale * x.a_scale, q_scale * x.b_scale
    return q_scale, q_scale


@gluon.jit
def shrunk(acc, alpha, p):
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 16])
    COUNT: gl.constexpr = p.DVP // 2
    alpha_v = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    alpha_v, acc = gl.broadcast(alpha_v, acc)
    return gl.inline_asm_elementwise(
        shrink_code(COUNT), shrink_operands(COUNT), [acc, alpha_v], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def as_operand(x, p, s):
    DOT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 16]), 2)
    return gl.convert_layout(x.to(s.v.dtype), DOT, assert_trivial=True)


@gluon.jit
def start_values(acc, a, b, stage, p, s):
    """acc + P V of a stage's two units, under way."""
    acc = warpgroup_mma(a, s.v.index(2 * stage).reshape([UNIT, p.DVP]), acc, is_async=True)
    return warpgroup_mma(b, s.v.index(2 * stage + 1).reshape([UNIT, p.DVP]), acc, is_async=True)


@gluon.jit
def with_values(acc, total, a_p, b_p, alpha, stage, p, s):
    """(acc, total) shrunk and with a step's probabilities, and what they weigh."""
    acc = shrunk(acc, alpha, p)
    acc = start_values(acc, as_operand(a_p, p, s), as_operand(b_p, p, s), stage, p, s)
    total = total * per_lane(alpha) + (lane_sum(a_p) + lane_sum(b_p))
    return warpgroup_mma_wait(0, deps=(acc,)), total


@gluon.jit
def broken(scores):
    """NaN for rows with a NaN among their scores, which maxima pass over; else 0."""
    return gl.where(gl.max((scores != scores).to(gl.int32), 1) != 0, float("nan"), 0.0)


@gluon.jit
def fold_step(acc, total, best, skipped, q, rows, q_scale, lam, x, c, t, wg: gl.constexpr, p, s, INT8: gl.constexpr,
              MASK: gl.constexpr):  # fmt: skip
    """Fold a step, the program's c-th, into (acc, total, best), and wait for it."""
    stage, parity = ring(c, p)
    mbarrier.wait(s.full.index(stage), parity)
    a, b = halves(warpgroup_mma_wait(0, deps=(start_scores(q, stage, INT8, p, s),)))
    a_factor, b_factor = factors_of(x, q_scale, INT8)
    if MASK:
        a_hidden = hidden_pairs(t.at, rows, x.a_key, True, p)
        b_hidden = hidden_pairs(t.at, rows, x.b_key, x.b_real, p)
        a = gl.where(a_hidden, HIDDEN if INT8 else float("-inf"), a)
        b = gl.where(b_hidden, HIDDEN if INT8 else float("-inf"), b)
    if p.SECOND:
        a_sees = rows < t.at.q_len
        b_sees = a_sees
        if MASK:
            a_sees = a_sees & some_shown(a_hidden)
            b_sees = b_sees & some_shown(b_hidden)
        a_judged, b_judged = a_factor, b_factor
        if not INT8:
            a_judged += broken(a)
            b_judged += broken(b)
        best_now, wanted, idle = wanted_units(
            a, b, a_judged, b_judged, a_sees, b_sees, best, lam, x.needed, s.votes.index(wg), p.BK
        )
        skipped += idle
        if wanted != 0:
            a_p = probabilities(a, a_factor, best_now + gl.where((wanted & 1) != 0, 0.0, float("inf")))
            b_p = probabilities(b, b_factor, best_now + gl.where((wanted & 2) != 0, 0.0, float("inf")))
            if MASK:
                a_p = gl.where(a_hidden, 0.0, a_p)
                b_p = gl.where(b_hidden, 0.0, b_p)
            acc, total = with_values(acc, total, a_p, b_p, gl.exp2(best - best_now), stage, p, s)
            best = best_now
    else:
        best_now = followed(a, b, a_factor, b_factor, best, 0.0, p.SLACK)
        a_p, b_p = probabilities(a, a_factor, best_now), probabilities(b, b_factor, best_now)
        if MASK:  # what is hidden may be the best of all, or NaN if the row's scale is
            a_p = gl.where(a_hidden, 0.0, a_p)
            b_p = gl.where(b_hidden, 0.0, b_p)
        acc, total = with_values(acc, total, a_p, b_p, gl.exp2(best - best_now), stage, p, s)
        best = best_now
    mbarrier.arrive(s.empty.index(stage), count=1)
    return acc, total, best, skipped


@gluon.jit
def fold_steps(acc, total, best, skipped, q, rows, q_scale, lam, t, first, last, c, wg: gl.constexpr, p, s,
               INT8: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Fold the tile's steps from first to last; the program's count of steps is c before the tile."""
    if first < last:
        x = step_of(t, first, p, MASK)
        for step in range(first, last):
            following = step_of(t, gl.minimum(step + 1, last - 1), p, MASK)  # on its way while this one is folded
            acc, total, best, skipped = fold_step(
                acc, total, best, skipped, q, rows, q_scale, lam, x, c + step, t, wg, p, s, INT8, MASK
            )
            x = following
    return acc, total, best, skipped


@gluon.jit
def store_rows(acc, total, best, t, wg: gl.constexpr, p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row,
               DV: gl.constexpr, INT8: gl.constexpr):  # fmt: skip
    """Divide, and write: through shared memory, so that a row's channels leave sixteen bytes at a time."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 16])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // p.DVP, p.DVP // 8], [4, 1], [1, 0])
    ALIGNED: gl.constexpr = 8 if DV % 8 == 0 else 1  # channels that every stride is a multiple of
    row_total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
    inverse = gl.where(row_total == 0, 0.0, 1.0 / row_total)  # a row that sees nothing gives 0; NaN stays NaN
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    staged = s.rows.index(wg)
    staged.store((acc * inverse).to(OUT.dtype.element_ty))
    first_row = t.first_row + wg * ROWS
    wide = t.at.bh.to(gl.int64)
    dv = gl.arange(0, p.DVP, gl.SliceLayout(0, FLAT))
    at = gl.expand_dims(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, FLAT)), 1)
    target = OUT + (wide // p.heads) * (o_batch // ALIGNED * ALIGNED) + (wide % p.heads) * (o_head // ALIGNED * ALIGNED)
    target = target + at.to(gl.int64) * (o_row // ALIGNED * ALIGNED) + gl.expand_dims(dv, 0)
    gl.store(target, staged.load(FLAT), mask=(at < p.q_len) & gl.expand_dims(dv < DV, 0))
    if p.WRITE_LSE:
        rows = first_row + gl.arange(0, ROWS, ROW)
        place = wide * p.q_len + rows
        lse = (best + gl.log2(row_total)) / 1.4426950408889634
        if INT8:
            lse += gl.load(LSE_TERM + place, mask=rows < p.q_len, other=0.0)  # what smoothing took from every score
        gl.store(LSE + place, gl.where(row_total == 0, float("-inf"), lse), mask=rows < p.q_len)


@gluon.jit
def consumer(wg: gl.constexpr, p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr,
             INT8: gl.constexpr):  # fmt: skip
    """One warpgroup: its 64 rows of every tile the program draws."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 16])
    c = 0
    turn = 0
    tile, t, q_scale = next_tile(turn, wg, INT8, p, s)
    while tile >= 0:
        rows = t.first_row + wg * ROWS + gl.arange(0, ROWS, ROW)
        q_scale *= p.scale
        acc = gl.zeros([ROWS, p.DVP], gl.float32, VALUES)
        total = gl.zeros([ROWS, 8], gl.float32, LANES)
        best = gl.full([ROWS], NOTHING, gl.float32, ROW)
        skipped = tile * 0
        lam = p.scale
        if p.SECOND:
            lam = gl.load(p.LAMBDA + t.at.bh % p.heads) * 1.4426950408889634
        mbarrier.wait(s.q_full.index(turn & 1), (turn >> 1) & 1)
        q = s.q.index((turn & 1) * p.WGS + wg).reshape([ROWS, p.D])
        acc, total, best, skipped = fold_steps(
            acc, total, best, skipped, q, rows, q_scale, lam, t, 0, t.masked_steps, c, wg, p, s, INT8, True
        )
        q = queries_again(turn, wg, p, s).reshape([ROWS, p.D])
        acc, total, best, skipped = fold_steps(
            acc, total, best, skipped, q, rows, q_scale, lam, t, t.masked_steps, t.steps, c, wg, p, s, INT8, False
        )
        if p.SECOND:
            note_skips(skipped, t, wg, p)
        c += t.steps
        mbarrier.arrive(s.q_empty.index(turn & 1), count=1)
        turn += 1
        tile, after, q_scale = next_tile(turn, wg, INT8, p, s)  # meanwhile these rows are written
        store_rows(acc, total, best, t, wg, p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV, INT8)
        t = after


@gluon.jit
def first_consumer(p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr, INT8: gl.constexpr):
    consumer(0, p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV, INT8)


@gluon.jit
def second_consumer(p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr, INT8: gl.constexpr):
    consumer(1, p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV, INT8)


@gluon.jit(do_not_specialize=LENGTHS)
def attend(
    q_boxes, k_boxes, v_boxes,  # [B, Hq, Nq, D] and [B, Hkv, Nk, D], int8 or 16 bits; 16 bits [B, Hkv, Nk, DV]
    COUNTS, CUTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, V_FINITE, LAMBDA, LSE_TERM,
    SKIPPED, OUT, LSE,  # SKIPPED holds zeros; TICKETS what programs draw first, 0 or more than there are tiles
    heads, group, q_len, k_len, q_blocks, first_block, k_blocks, k_slots, padded, tiles, left, right, scale,
    o_batch, o_head, o_row,
    D: gl.constexpr, DVP: gl.constexpr, DV: gl.constexpr, INT8: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, CUTS_FIRST: gl.constexpr, HAS_VALID: gl.constexpr, WRITE_LSE: gl.constexpr,
    SECOND: gl.constexpr, SKIP_ROWS: gl.constexpr, SOME_HEADS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    WGS: gl.constexpr = 2
    SCORE_BYTES: gl.constexpr = 1 if INT8 else 2
    p = Problem(
        heads, group, q_len, k_len, q_len, k_len, q_blocks, first_block, k_blocks, k_slots, padded, tiles,
        tiles, tiles, left, right, scale, COUNTS, CUTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, VALID, VALID, V_FINITE,
        LAMBDA, SKIPPED, VALID, D, DVP, WGS, BQ, BK, STAGES, CUTS_FIRST, HAS_VALID, WRITE_LSE, False, SECOND, SKIP_ROWS,
        SLACK, 2, False, False,
    )  # fmt: skip
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(2):
        set_word(slots, i, i, 4)
    s = Shared(
        gl.allocate_shared_memory(q_boxes.dtype, [2 * WGS, 1, 1, ROWS, D], q_boxes.layout),
        gl.allocate_shared_memory(k_boxes.dtype, [STAGES, 1, 1, 2 * UNIT, D], k_boxes.layout),
        gl.allocate_shared_memory(v_boxes.dtype, [2 * STAGES, 1, 1, UNIT, DVP], v_boxes.layout),
        gl.allocate_shared_memory(OUT.dtype.element_ty, [WGS, ROWS, DVP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.int8, [WGS, 4 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), slots,
        barriers(2, 1), barriers(2, WGS), barriers(STAGES, 1), barriers(STAGES, WGS), barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    Q_BYTES: gl.constexpr = WGS * ROWS * D * SCORE_BYTES
    STAGE_BYTES: gl.constexpr = 2 * UNIT * (D * SCORE_BYTES + 2 * DVP)
    gl.warp_specialize([
        (first_consumer, (p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV, INT8)),
        (second_consumer, (p, s, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV, INT8)),
        (producer, (q_boxes, k_boxes, v_boxes, Q_BYTES, STAGE_BYTES, SOME_HEADS, p, s)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
