"""The "probe" rule for sm_90 in Gluon: what `triton._probe` computes, by warps with tasks of their own.

A tile is 64 sampled rows of one head for each of WGS consumer warpgroups. One producer warp fills a ring of stages of
128 keys by TMA, which all of them read: the more there are, the less comes from L2. A thread compares the sixteen
scores that it holds of a row and 64 keys, which are one group: nothing moves for it, and exponentials are few. The
logarithms of the blocks' weights go to scratch that belongs to the warpgroup, [blocks, 64 rows], and become shares when
the rows' totals are known. Scores are those that attention will have: of int8 copies where there are such (INT8), else
of bfloat16. Where registers hold the scores of two steps, products run while those of the step before are looked at
(AHEAD).

Values may be prepared meanwhile, by two warps more (VALUES_TOO): that waits for memory, which the probe hardly
touches, and for nothing that the probe computes.

A row's best follows only jumps of many bits, so that totals are rarely rescaled: float32 has room for them. Programs
take tile after tile, the heaviest of all heads first, and every other turn in reverse order: who had the heaviest takes
the lightest.
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
    GROUPS,
    HALF_SCORES,
    HIDDEN,
    NOTHING,
    ROW,
    ROWS,
    SCORES,
    UNIT,
    barriers,
    follow,
    halves,
    load_box,
    ring,
    set_word,
    wait_for_all,
    word_of,
)
from sparge.backends.hopper._values import WARPS, Values, prepare_all_values, values_shared

STEP = gl.constexpr(128)  # keys
WORD = gl.constexpr(32)
SLACK = gl.constexpr(40.0)  # bits that a score may exceed the row's best by before that follows: 2^40 is small in 32
CHUNK = gl.constexpr(64)  # blocks whose shares are made at once


@aggregate
class Problem:
    """What the launch says."""

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    q_blocks: gl.tensor
    share_rows: gl.tensor
    words: gl.tensor
    k_units: gl.tensor  # scales of keys between one head and the next
    right: gl.tensor
    probing: gl.tensor  # programs that have tiles
    all_tiles: gl.tensor
    first_head: gl.tensor
    heads_here: gl.tensor  # from first_head on
    scale: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_row: gl.tensor
    Q: gl.tensor
    Q_SCALE: gl.tensor
    K_SCALE: gl.tensor
    LOGS: gl.tensor
    SHARES: gl.tensor
    INT8: gl.constexpr
    DIM: gl.constexpr
    D: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    PROBES: gl.constexpr
    WGS: gl.constexpr
    AHEAD: gl.constexpr  # products run while the scores of the step before are looked at
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, heads, group, q_len, k_len, q_blocks, share_rows, words, k_units, right, probing, all_tiles, first_head,
        heads_here, scale, q_batch, q_head, q_row, Q, Q_SCALE, K_SCALE, LOGS, SHARES,
        INT8, DIM, D, BQ, BK, PROBES, WGS, AHEAD, STAGES,
    ):  # fmt: skip
        self.heads, self.group, self.q_len, self.k_len, self.q_blocks = heads, group, q_len, k_len, q_blocks
        self.share_rows, self.words, self.k_units, self.right = share_rows, words, k_units, right
        self.scale, self.Q_SCALE, self.K_SCALE, self.INT8 = scale, Q_SCALE, K_SCALE, gl.constexpr(INT8)
        self.probing, self.all_tiles = probing, all_tiles
        self.first_head, self.heads_here = first_head, heads_here
        self.q_batch, self.q_head, self.q_row = q_batch, q_head, q_row
        self.Q, self.LOGS, self.SHARES = Q, LOGS, SHARES
        self.DIM, self.D, self.BQ, self.BK = map(gl.constexpr, (DIM, D, BQ, BK))
        self.PROBES, self.WGS, self.AHEAD, self.STAGES = map(gl.constexpr, (PROBES, WGS, AHEAD, STAGES))


@aggregate
class Shared:
    q: gl.shared_memory_descriptor  # [WGS, 64, D]: each written and read by one warpgroup
    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, 128, D]
    scales: gl.shared_memory_descriptor  # [2 STAGES, 1]: of a stage's keys, with INT8
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, scales, full, empty):
        self.q, self.k, self.scales, self.full, self.empty = q, k, scales, full, empty


@aggregate
class Tile:
    """Sampled rows of one head, and the steps that their keys take."""

    bh: gl.tensor
    first: gl.tensor  # of the head's sampled rows
    steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, bh, first, steps):
        self.bh, self.first, self.steps = bh, first, steps


# ---- what producer and consumers work out alike


@gluon.jit
def tile_number(turn, p):
    """Which tile a program takes in its turn, the heaviest being the first; one beyond all tiles if none."""
    place = gl.program_id(0)
    n = turn * p.probing + gl.where(turn % 2 == 0, place, p.probing - 1 - place)
    return gl.where(place < p.probing, n, p.all_tiles)


@gluon.jit
def sampled_row(i, p):
    """Where the i-th sampled row of a head is; its block must be real."""
    inside = (i % p.PROBES + 1) * p.BQ // p.PROBES
    return gl.minimum(i // p.PROBES * p.BQ + inside, p.q_len) - 1


@gluon.jit
def keys_seen(row, p):
    """How many keys, from the first on."""
    return gl.maximum(gl.minimum(row + (p.k_len - p.q_len) + p.right + 1, p.k_len), 0)


@gluon.jit
def steps_of(first, COUNT: gl.constexpr, p):
    """Steps that reach all keys of COUNT sampled rows from `first` on: the last real one sees most."""
    last = gl.minimum(first + COUNT, p.q_blocks * p.PROBES) - 1
    seen = gl.where(last >= first, keys_seen(sampled_row(gl.maximum(last, 0), p), p), 0)
    return (seen + STEP - 1) // STEP


@gluon.jit
def tile_of(n, p):
    TILE: gl.constexpr = ROWS * p.WGS
    tile = (p.all_tiles - 1 - n) // p.heads_here
    first = tile * TILE
    return Tile(p.first_head + n % p.heads_here, first, steps_of(first, TILE, p))


# ---- the producer


@gluon.jit
def load_keys(k_boxes, c, batch, head, key, p, s):
    """128 keys, into a stage that every consumer has left."""
    stage, parity = ring(c, p)
    full = s.full.index(stage)
    if p.INT8:
        scales = p.K_SCALE + (batch * (p.heads // p.group) + head).to(gl.int64) * p.k_units + key // UNIT
        a_scale, b_scale = gl.load(scales), gl.load(scales + 1)
    mbarrier.wait(s.empty.index(stage), parity ^ 1)
    if p.INT8:
        set_word(s.scales, 2 * stage, a_scale, 1)
        set_word(s.scales, 2 * stage + 1, b_scale, 1)
    mbarrier.expect(full, STEP * p.D * (1 if p.INT8 else 2))
    load_box(k_boxes, [batch, head, key, 0], full, s.k.index(stage).slice(0, UNIT, 2))
    load_box(k_boxes, [batch, head, key + UNIT, 0], full, s.k.index(stage).slice(UNIT, UNIT, 2))


@gluon.jit
def producer(k_boxes, p, s):
    c = 0
    turns = (p.all_tiles + p.probing - 1) // p.probing
    for turn in range(turns):
        n = tile_number(turn, p)
        if n < p.all_tiles:
            t = tile_of(n, p)
            batch = t.bh // p.heads
            head = t.bh % p.heads // p.group
            for step in range(t.steps):
                load_keys(k_boxes, c + step, batch, head, step * STEP, p, s)
            c += t.steps


# ---- the consumers


@gluon.jit
def load_queries(t, wg: gl.constexpr, p, s):
    """A warpgroup's sampled rows, into its part of shared memory: visible to the tensor core when all have done so."""
    NEXT: gl.constexpr = 16 if p.INT8 else 8  # channels of sixteen bytes, which every stride is a multiple of
    FLAT: gl.constexpr = gl.BlockedLayout([1, NEXT], [32 * NEXT // p.D, p.D // NEXT], [4, 1], [1, 0])
    i = t.first + wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    d = gl.arange(0, p.D, gl.SliceLayout(0, FLAT))
    wide = t.bh.to(gl.int64)
    source = p.Q + (wide // p.heads) * (p.q_batch // NEXT * NEXT) + (wide % p.heads) * (p.q_head // NEXT * NEXT)
    source += gl.expand_dims(sampled_row(i, p).to(gl.int64) * (p.q_row // NEXT * NEXT), 1) + gl.expand_dims(d, 0)
    real = gl.expand_dims(i < p.q_blocks * p.PROBES, 1) & gl.expand_dims(d < p.DIM, 0)
    s.q.index(wg).store(gl.load(source, mask=real, other=0))
    fence_async_shared()
    wait_for_all()


@gluon.jit
def start_scores(q, stage, p, s):
    """Raw scores of a stage's 128 keys, under way."""
    k = s.k.index(stage).reshape([STEP, p.D]).permute((1, 0))
    if p.INT8:
        nothing = gl.zeros([ROWS, STEP], gl.int32, SCORES)
    else:
        nothing = gl.zeros([ROWS, STEP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16]))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def group_best(raw):
    """The largest of the sixteen scores that a thread holds of each row and 64 keys, [64, 4]: its group's."""
    best = gl.max(raw.reshape([ROWS, UNIT // 8, 8]), 1)
    return gl.convert_layout(gl.max(best.reshape([ROWS, 4, 2]), 2), GROUPS, assert_trivial=True)


@gluon.jit
def per_group(x):
    """A number per row, in all threads that hold the row's groups."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, GROUPS), assert_trivial=True), 1)


@gluon.jit
def scaled(best, factor, MASK: gl.constexpr, INT8: gl.constexpr):
    """Scores of groups to base 2; what is hidden or broken is passed over."""
    scores = best.to(gl.float32) * per_group(factor)
    if INT8 and MASK:
        scores = gl.where(best == HIDDEN, float("-inf"), scores)
    return gl.maximum(scores, float("-inf"))  # of a number and NaN it is the number


@gluon.jit
def log2(x):
    """One instruction, good to 22 bits; Triton's takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def gather_code(BLOCKS):
    """PTX: the logarithm of one row's weight in a block, $0 = $1; a thread has the groups of two rows in two units of
    keys, $2 $3 and $4 $5, relative to $6 $7. Four threads hold a row.

    Each keeps what it will have the sum of and sends the rest: odd threads get the second row, the last two the second
    unit, or, if both belong to one block, the sum of both. Who is which is asked anew: registers are scarce.
    """
    swap = "selp.f32 k, {1}, {0}, odd; selp.f32 s, {0}, {1}, odd; "
    swap += "shfl.sync.bfly.b32 s, s, 1, 31, -1; add.f32 {2}, k, s; "
    code = "{ .reg .pred odd, late; .reg .b32 lane, i; .reg .f32 k, s, x, y; mov.u32 lane, %laneid; "
    code += "and.b32 i, lane, 1; setp.ne.s32 odd, i, 0; "
    if BLOCKS == 2:
        code += "and.b32 i, lane, 2; setp.ne.s32 late, i, 0; "
        code += swap.format("$2", "$3", "x") + swap.format("$4", "$5", "y")
        code += "selp.f32 k, y, x, late; selp.f32 s, x, y, late; shfl.sync.bfly.b32 s, s, 2, 31, -1; add.f32 x, k, s; "
    else:
        code += "add.f32 x, $2, $4; add.f32 y, $3, $5; " + swap.format("x", "y", "x")
        code += "shfl.sync.bfly.b32 s, x, 2, 31, -1; add.f32 x, x, s; "
    return code + "lg2.approx.ftz.f32 x, x; selp.f32 k, $7, $6, odd; add.f32 $0, x, k; mov.f32 $1, $0; }"


@gluon.jit
def store_logs(logs, a, b, best, step, p):
    """The logarithms of a step's blocks' weights, to [block, row]: each thread stores one."""
    BLOCKS: gl.constexpr = STEP // p.BK
    CODE: gl.constexpr = gather_code(BLOCKS)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, GROUPS)), 1)
    which = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUPS)), 0)
    which, row = gl.broadcast(which, row)
    sums = gl.inline_asm_elementwise(CODE, "=f,=f,f,f,f,f,f,f", [a, b, best], dtype=gl.float32, is_pure=True, pack=2)
    block = which // 2 if BLOCKS == 2 else 0
    place = logs + (BLOCKS * step + block) * ROWS + ((row & ~8) | (which % 2 * 8))  # a thread's rows are 8 apart
    gl.store(place, sums, mask=((row & 8) == 0) & (which // 2 < BLOCKS))


@gluon.jit
def begin_step(q, step, c, p, s):
    """Wait for a step's keys: their scores, under way, and the scales of both units. The program's count of steps is c
    before the tile."""
    stage, parity = ring(c + step, p)
    mbarrier.wait(s.full.index(stage), parity)
    raw = start_scores(q, stage, p, s)
    a_scale, b_scale = p.scale, p.scale
    if p.INT8:
        a_scale, b_scale = word_of(s.scales, 2 * stage, 4), word_of(s.scales, 2 * stage + 1, 4)
    return raw, a_scale, b_scale


@gluon.jit
def leave(step, c, p, s):
    """Let the producer have a step's stage again."""
    stage, _ = ring(c + step, p)
    mbarrier.arrive(s.empty.index(stage), count=1)


@gluon.jit
def fold_scores(raw, a_scale, b_scale, best, total, q_scale, high, logs, step, p, MASK: gl.constexpr):
    """Fold a step's scores into the rows' best and total; store the logarithms of its blocks' weights."""
    UNSEEN: gl.constexpr = HIDDEN if p.INT8 else float("-inf")
    a, b = halves(raw)
    if MASK:
        column = gl.expand_dims(gl.arange(0, UNIT, gl.SliceLayout(0, HALF_SCORES)), 0)
        a = gl.where(column < gl.expand_dims(high - step * STEP, 1), a, UNSEEN)
        b = gl.where(column < gl.expand_dims(high - step * STEP - UNIT, 1), b, UNSEEN)
    a = scaled(group_best(a), q_scale * a_scale, MASK, p.INT8)
    b = scaled(group_best(b), q_scale * b_scale, MASK, p.INT8)
    best, total = follow(best, total, gl.maximum(a, b), SLACK)
    a, b = gl.exp2(a - best), gl.exp2(b - best)
    store_logs(logs, a, b, best, step, p)
    return best, total + (a + b)


@gluon.jit
def fold_step(best, total, q, q_scale, high, logs, step, c, p, s, MASK: gl.constexpr):
    raw, a_scale, b_scale = begin_step(q, step, c, p, s)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    leave(step, c, p, s)
    return fold_scores(raw, a_scale, b_scale, best, total, q_scale, high, logs, step, p, MASK)


@gluon.jit
def fold_ahead(raw, a_scale, b_scale, best, total, q, q_scale, high, logs, step, c, p, s, MASK: gl.constexpr):
    """Fold a step's scores while the next step's products run: those come back in their place."""
    following, a_next, b_next = begin_step(q, step + 1, c, p, s)
    best, total = fold_scores(raw, a_scale, b_scale, best, total, q_scale, high, logs, step, p, MASK)
    following, total = warpgroup_mma_wait(0, deps=(following, total))  # with the total, or it comes after the wait
    leave(step + 1, c, p, s)
    return following, a_next, b_next, best, total


@gluon.jit
def fold_steps(best, total, q, q_scale, high, logs, edge, steps, c, p, s):
    """Fold all steps of a warpgroup's rows; every row sees all keys of those before `edge`."""
    if p.AHEAD:
        if steps > 0:
            edge = gl.minimum(edge, steps - 1) // 2 * 2
            raw, a_scale, b_scale = begin_step(q, 0, c, p, s)
            raw = warpgroup_mma_wait(0, deps=(raw,))
            leave(0, c, p, s)
            for step in range(0, edge, 2):  # by two, so that scores stay in their registers
                raw, a_scale, b_scale, best, total = fold_ahead(
                    raw, a_scale, b_scale, best, total, q, q_scale, high, logs, step, c, p, s, False
                )
                raw, a_scale, b_scale, best, total = fold_ahead(
                    raw, a_scale, b_scale, best, total, q, q_scale, high, logs, step + 1, c, p, s, False
                )
            for step in range(edge, steps - 1):
                raw, a_scale, b_scale, best, total = fold_ahead(
                    raw, a_scale, b_scale, best, total, q, q_scale, high, logs, step, c, p, s, True
                )
            best, total = fold_scores(raw, a_scale, b_scale, best, total, q_scale, high, logs, steps - 1, p, True)
    else:
        for step in range(edge):
            best, total = fold_step(best, total, q, q_scale, high, logs, step, c, p, s, False)
        for step in range(edge, steps):
            best, total = fold_step(best, total, q, q_scale, high, logs, step, c, p, s, True)
    return best, total


@gluon.jit
def make_shares(t, walked, logs, wg: gl.constexpr, p):
    """The mean shares of each query block, from its rows' logarithms and totals: 0 where no row looked."""
    PROBES: gl.constexpr = p.PROBES
    BLOCKS: gl.constexpr = ROWS // PROBES  # of queries
    NEAR: gl.constexpr = PROBES if PROBES < 4 else 4  # rows of a query block in one thread, which holds four rows
    APART: gl.constexpr = PROBES // NEAR
    ORDER: gl.constexpr = [1, 0, 2] if PROBES > 1 else [0, 1, 2]
    FLAT: gl.constexpr = gl.BlockedLayout([4 // NEAR, NEAR, 8], [16 // APART, APART, 2], [1, 1, 4], ORDER)
    MEANS: gl.constexpr = gl.SliceLayout(1, FLAT)
    width = p.words * WORD
    slot = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))
    probe = gl.arange(0, PROBES, gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))
    row = gl.expand_dims(slot * PROBES, 1) + gl.expand_dims(probe, 0)
    log_total = gl.expand_dims(gl.load(logs + width * ROWS + row), 2)
    row = gl.expand_dims(row, 2)
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(0, FLAT)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)

    block = (t.first + wg * ROWS) // PROBES + gl.arange(0, BLOCKS, gl.SliceLayout(1, MEANS))
    start = (t.bh - p.first_head).to(gl.int64) * p.share_rows + block
    target = gl.expand_dims(p.SHARES + start * width, 1)
    real = gl.expand_dims(block < p.q_blocks, 1)
    opens = gl.expand_dims(block == 0, 1)
    target_column = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, MEANS)), 0)
    for first in range(0, width, CHUNK):
        looked = (first + column < walked) & (row >= 0)
        share = gl.exp2(gl.load(logs + (first + column) * ROWS + row, mask=looked, other=float("-inf")) - log_total)
        share = gl.where(share == share, share, 0.0)  # a row that sees nothing, or whose total is NaN
        mean = (gl.sum(share, 1) * (1.0 / PROBES)).to(gl.float16)
        there = real & (first + target_column < width)
        gl.store(target + width + (first + target_column), mean, mask=there)
        # Nothing stands before the first block: it stands there itself.
        gl.store(target + (first + target_column), mean, mask=there & opens)


@gluon.jit
def probe_tile(t, c, wg: gl.constexpr, p, s):
    """A warpgroup's 64 rows of a tile. The program's count of steps is c before it."""
    load_queries(t, wg, p, s)  # and all have read what the tile before left in the scratch
    q = s.q.index(wg)
    first = t.first + wg * ROWS
    i = gl.arange(0, ROWS, ROW)
    high = gl.where(first + i < p.q_blocks * p.PROBES, keys_seen(sampled_row(first + i, p), p), 0)
    q_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
    if p.INT8:
        row = t.bh.to(gl.int64) * p.q_len + sampled_row(first + i, p)
        q_scale = gl.load(p.Q_SCALE + row, mask=first + i < p.q_blocks * p.PROBES, other=0.0) * p.scale
    best = gl.full([ROWS, 4], NOTHING, gl.float32, GROUPS)
    total = gl.full([ROWS, 4], 0.0, gl.float32, GROUPS)  # of each thread's groups
    width = p.words * WORD
    logs = p.LOGS + (gl.program_id(0) * p.WGS + wg).to(gl.int64) * ((width + 1) * ROWS)
    steps = steps_of(first, ROWS, p)
    edge = gl.minimum(keys_seen(sampled_row(first, p), p) // STEP, steps)  # all rows see every key before
    best, total = fold_steps(best, total, q, q_scale, high, logs, edge, steps, c, p, s)
    for step in range(steps, t.steps):  # that only other warpgroups' rows see
        stage, parity = ring(c + step, p)
        mbarrier.wait(s.full.index(stage), parity)
        # No products keep the warps together here: one that falls behind by a turn of the ring would wait for ever.
        wait_for_all()
        mbarrier.arrive(s.empty.index(stage), count=1)
    row_best = gl.convert_layout(gl.max(best, 1), ROW, assert_trivial=True)
    row_total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
    gl.store(logs + width * ROWS + i, row_best + log2(row_total))
    wait_for_all()  # every thread's logarithms are written before another reads them
    make_shares(t, steps * (STEP // p.BK), logs, wg, p)


@gluon.jit
def consumer(wg: gl.constexpr, p, s):
    c = 0
    turns = (p.all_tiles + p.probing - 1) // p.probing
    for turn in range(turns):
        n = tile_number(turn, p)
        if n < p.all_tiles:
            t = tile_of(n, p)
            probe_tile(t, c, wg, p, s)
            c += t.steps


@gluon.jit
def first_consumer(p, s):
    consumer(0, p, s)


@gluon.jit
def second_consumer(p, s):
    consumer(1, p, s)


@gluon.jit
def third_consumer(p, s):
    consumer(2, p, s)


@gluon.jit
def fourth_consumer(p, s):
    consumer(3, p, s)


LENGTHS = ["heads", "group", "q_len", "k_len", "q_blocks", "share_rows", "words", "k_units", "right", "probing",
           "all_tiles", "first_head", "heads_here", "scale", "q_batch", "q_head", "q_row", "batch", "v_tiles", "padded",
           "k_slots"]  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def probe(
    k_boxes,  # bfloat16 [B, Hkv, Nk, D], or int8 copies
    Q,  # alike, [B, Hq, Nq, DIM]; strides are multiples of sixteen bytes, channels lie next to each other
    Q_SCALE, K_SCALE,  # of int8 copies
    LOGS,  # scratch: float32 [programs, WGS, key blocks, rounded up to whole words, and one more for totals, 64]
    SHARES,  # output: float16 [heads_here, share_rows, key blocks, rounded up]; see triton._select.share_row
    v_boxes, V_SCALE, V_MEAN, V_FINITE, V_REPAIR, V8,  # as in preparation, which this is too with VALUES_TOO
    heads, group, q_len, k_len, q_blocks, share_rows, words, k_units, right, probing, all_tiles, first_head, heads_here,
    scale, q_batch, q_head, q_row, batch, v_tiles, padded, k_slots,
    INT8: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, PROBES: gl.constexpr,
    WGS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, VALUES_TOO: gl.constexpr, DV: gl.constexpr,
    V_STAGES: gl.constexpr, REGISTERS: gl.constexpr, V_REGISTERS: gl.constexpr,
):  # fmt: skip
    p = Problem(
        heads, group, q_len, k_len, q_blocks, share_rows, words, k_units, right, probing, all_tiles, first_head,
        heads_here, scale, q_batch, q_head, q_row, Q, Q_SCALE, K_SCALE, LOGS, SHARES, INT8, DIM, D, BQ, BK, PROBES, WGS,
        AHEAD, STAGES,
    )  # fmt: skip
    BITS: gl.constexpr = 8 if INT8 else 16
    SWIZZLE: gl.constexpr = 128 if D * BITS >= 1024 else 64
    s = Shared(
        gl.allocate_shared_memory(k_boxes.dtype, [WGS, ROWS, D], gl.NVMMASharedLayout(SWIZZLE, BITS, 2)),
        gl.allocate_shared_memory(k_boxes.dtype, [STAGES, 1, 1, STEP, D], k_boxes.layout),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(STAGES, 1), barriers(STAGES, WGS),
    )  # fmt: skip
    if VALUES_TOO:
        v = Values(
            batch, heads // group, v_tiles, k_len, padded, k_slots, V_SCALE, V_MEAN, V_FINITE, V_REPAIR, V8,
            DV, D, BK, V_STAGES,
        )  # fmt: skip
        values = (v_boxes, v, values_shared(v_boxes, D, V_STAGES))
        fence_async_shared()
        if WGS == 4:
            gl.warp_specialize([
                (first_consumer, (p, s)), (second_consumer, (p, s)), (third_consumer, (p, s)),
                (fourth_consumer, (p, s)), (prepare_all_values, values), (producer, (k_boxes, p, s)),
            ], [4, 4, 4, WARPS, 1], [REGISTERS, REGISTERS, REGISTERS, V_REGISTERS, V_REGISTERS])  # fmt: skip
        elif WGS == 2:
            gl.warp_specialize([
                (first_consumer, (p, s)), (second_consumer, (p, s)), (prepare_all_values, values),
                (producer, (k_boxes, p, s)),
            ], [4, WARPS, 1], [REGISTERS, V_REGISTERS, V_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (first_consumer, (p, s)), (prepare_all_values, values), (producer, (k_boxes, p, s)),
            ], [WARPS, 1], [V_REGISTERS, V_REGISTERS])  # fmt: skip
    else:
        fence_async_shared()
        if WGS == 4:
            gl.warp_specialize([
                (first_consumer, (p, s)), (second_consumer, (p, s)), (third_consumer, (p, s)),
                (fourth_consumer, (p, s)), (producer, (k_boxes, p, s)),
            ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
        elif WGS == 2:
            gl.warp_specialize([
                (first_consumer, (p, s)), (second_consumer, (p, s)), (producer, (k_boxes, p, s)),
            ], [4, 1], [REGISTERS, 24])  # fmt: skip
        else:
            gl.warp_specialize([(first_consumer, (p, s)), (producer, (k_boxes, p, s))], [1], [24])
