"""Selection for sm_90 in Gluon: what `triton._select` computes for rules that need no search.

A program owns 64 sub-rows of one head for each of WGS consumer warpgroups, and walks the key blocks 32 at a time, a
word of the mask. One producer warp fetches the sub-means of a step by TMA, for all warpgroups: fetched for 64 sub-rows
alone they would be bound by L2. The four sub-scores of a block are in one thread, so that nothing moves to add them up.

The first walk finds each row's total and its largest weight, relative to its best sub-score, which follows only jumps
of many bits; the last one computes the weights again and compares. Sub-rows are in such an order that a thread's two
belong to one query block.
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

from sparge import probing
from sparge.backends.hopper._attend import (
    GROUPS,
    NOTHING,
    ROWS,
    barriers,
    follow_code,
    load_box,
    ring,
    set_word,
    wait_for_all,
    word_of,
)
from sparge.backends.hopper._probe import SLACK

WORD = gl.constexpr(32)  # key blocks of a step
SUBS = gl.constexpr(4)  # of query blocks and of key blocks
QUERY_BLOCKS = gl.constexpr(16)  # of a warpgroup
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, WEIGHTS))
LOG_SUBS = gl.constexpr(2.0)  # weights are means
BELOW_PEAK = gl.constexpr(1 - 2.0**-14)  # weights of the last walk differ from those of the first by roundings
CLAIMED = gl.constexpr(1.0e6)  # beyond every share
LOG2_E = gl.constexpr(1.4426950408889634)
NEIGHBOUR = gl.constexpr(probing.NEIGHBOUR)
FULL_LENGTH = gl.constexpr(probing.FULL_LENGTH)


@aggregate
class Problem:
    """What the launch says."""

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    q_slots: gl.tensor
    k_slots: gl.tensor
    words: gl.tensor
    right: gl.tensor
    sinks: gl.tensor
    share_rows: gl.tensor
    first_head: gl.tensor
    scale: gl.tensor
    Q_MEANS: gl.tensor
    V_FINITE: gl.tensor
    THRESHOLD: gl.tensor
    GAP: gl.tensor
    PROBE: gl.tensor
    SHARES: gl.tensor
    BITS: gl.tensor
    D: gl.constexpr
    DP: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    WGS: gl.constexpr
    STAGES: gl.constexpr
    USE_THRESHOLD: gl.constexpr
    USE_GAP: gl.constexpr
    USE_PROBE: gl.constexpr
    RIGHT_EDGE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, heads, group, q_len, k_len, q_slots, k_slots, words, right, sinks, share_rows, first_head, scale, Q_MEANS,
        V_FINITE, THRESHOLD, GAP, PROBE, SHARES, BITS, D, DP, BQ, BK, WGS, STAGES, USE_THRESHOLD, USE_GAP, USE_PROBE,
        RIGHT_EDGE,
    ):  # fmt: skip
        self.heads, self.group, self.q_len, self.k_len = heads, group, q_len, k_len
        self.q_slots, self.k_slots, self.words, self.right = q_slots, k_slots, words, right
        self.sinks, self.share_rows, self.first_head, self.scale = sinks, share_rows, first_head, scale
        self.Q_MEANS, self.V_FINITE, self.SHARES, self.BITS = Q_MEANS, V_FINITE, SHARES, BITS
        self.THRESHOLD, self.GAP, self.PROBE = THRESHOLD, GAP, PROBE
        self.D, self.DP, self.BQ, self.BK = map(gl.constexpr, (D, DP, BQ, BK))
        self.WGS, self.STAGES, self.RIGHT_EDGE = map(gl.constexpr, (WGS, STAGES, RIGHT_EDGE))
        self.USE_THRESHOLD, self.USE_GAP, self.USE_PROBE = map(gl.constexpr, (USE_THRESHOLD, USE_GAP, USE_PROBE))


@aggregate
class Shared:
    q: gl.shared_memory_descriptor  # [WGS, 64, DP]: each written and read by one warpgroup
    k: gl.shared_memory_descriptor  # [STAGES, 4, 32, DP]: sub-means of 32 blocks
    broken: gl.shared_memory_descriptor  # [STAGES, 1]: which of them hold values that are not finite
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, broken, full, empty):
        self.q, self.k, self.broken, self.full, self.empty = q, k, broken, full, empty


@aggregate
class Tile:
    """Query blocks of one head, and the steps that what they see takes."""

    bh: gl.tensor
    kv: gl.tensor
    first: gl.tensor  # query block
    steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, bh, kv, first, steps):
        self.bh, self.kv, self.first, self.steps = bh, kv, first, steps


@gluon.jit
def keys_seen(row, p):
    """How many keys, from the first on; rows beyond the last see what that sees."""
    row = gl.minimum(row, p.q_len - 1)
    return gl.maximum(gl.minimum(row + (p.k_len - p.q_len) + p.right + 1, p.k_len), 0)


@gluon.jit
def steps_of(first, COUNT: gl.constexpr, p):
    """Steps that reach all keys of COUNT query blocks from `first` on."""
    seen = gl.where(first * p.BQ < p.q_len, keys_seen((first + COUNT) * p.BQ - 1, p), 0)
    return (seen + WORD * p.BK - 1) // (WORD * p.BK)


@gluon.jit
def own_tile(heads_here, p):
    """The program's: of all heads the last query blocks first, which may see most."""
    PER_TILE: gl.constexpr = QUERY_BLOCKS * p.WGS
    tile = (gl.num_programs(0) - 1 - gl.program_id(0)) // heads_here
    bh = p.first_head + gl.program_id(0) % heads_here
    kv = bh // p.heads * (p.heads // p.group) + bh % p.heads // p.group
    return Tile(bh, kv, tile * PER_TILE, steps_of(tile * PER_TILE, PER_TILE, p))


@gluon.jit
def broken_blocks(kv, step, p):
    """Which of a step's blocks hold values that are not finite, as a word."""
    n = gl.arange(0, WORD, gl.BlockedLayout([1], [32], [1], [0]))
    block = step * WORD + n
    finite = gl.load(p.V_FINITE + kv.to(gl.int64) * p.k_slots + block, mask=block < p.k_slots, other=1)
    return gl.sum((finite == 0).to(gl.int32) << n, 0)


@gluon.jit
def producer(k_boxes, heads_here, p, s):
    t = own_tile(heads_here, p)
    for c in range(2 * t.steps):  # both walks
        stage, parity = ring(c, p)
        step = gl.where(c < t.steps, c, c - t.steps)
        broken = broken_blocks(t.kv, step, p)
        mbarrier.wait(s.empty.index(stage), parity ^ 1)
        set_word(s.broken, stage, broken, 1)
        mbarrier.expect(s.full.index(stage), SUBS * WORD * p.DP * 2)
        load_box(k_boxes, [t.kv * SUBS, step * WORD, 0], s.full.index(stage), s.k.index(stage))


# ---- the consumers


@gluon.jit
def sub_row_of(n):
    """Which of a warpgroup's sub-rows a row of the products is. A thread holds rows that are eight apart, of sixteen:
    they belong to one query block."""
    return n // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2


@gluon.jit
def over_sub_rows(x):
    """Sums of [64, columns] over the sub-rows of each query block, [16, columns]: half of it without an exchange."""
    x = gl.sum(x.reshape([4, 2, 4, 2, x.shape[1]]), 1)
    return gl.sum(x, 2).reshape([QUERY_BLOCKS, x.shape[3]])


@gluon.jit
def with_mates(x):
    """Sums of [64] over the sub-rows of each one's query block, for each of them: two are in a thread, two four lanes
    away."""
    CODE: gl.constexpr = (
        "{ .reg .f32 x, o; add.f32 x, $2, $3; shfl.sync.bfly.b32 o, x, 4, 31, -1; add.f32 $0, x, o; mov.f32 $1, $0; }"
    )
    return gl.inline_asm_elementwise(CODE, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def load_queries(t, wg: gl.constexpr, p, s):
    """A warpgroup's sub-means, into its part of shared memory."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // p.DP, p.DP // 8], [4, 1], [1, 0])
    n = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    sub_row = (t.first + wg * QUERY_BLOCKS) * SUBS + sub_row_of(n)
    d = gl.expand_dims(gl.arange(0, p.DP, gl.SliceLayout(0, FLAT)), 0)
    real = gl.expand_dims(sub_row < p.q_slots * SUBS, 1) & (d < p.D)
    source = p.Q_MEANS + t.bh.to(gl.int64) * (p.q_slots * SUBS * p.D) + gl.expand_dims(sub_row * p.D, 1) + d
    s.q.index(wg).store(gl.load(source, mask=real, other=0.0))
    fence_async_shared()
    wait_for_all()


@gluon.jit
def exp2(x):
    """One instruction; Triton's has more, for numbers below 2^-126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def start_scores(q, c, p, s):
    """Unscaled sub-scores of the program's c-th step, [64, 4 x 32], under way."""
    stage, parity = ring(c, p)
    mbarrier.wait(s.full.index(stage), parity)
    k = s.k.index(stage).reshape([SUBS * WORD, p.DP]).permute((1, 0))
    nothing = gl.zeros([ROWS, SUBS * WORD], gl.float32, SCORES)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def leave(c, p, s):
    stage, _ = ring(c, p)
    mbarrier.arrive(s.empty.index(stage), count=1)


@gluon.jit
def filled_only(raw, step, p):
    """Sub-scores, -inf where a sub-block holds no key."""
    n = gl.arange(0, SUBS * WORD, gl.SliceLayout(0, SCORES))
    start = (step * WORD + n % WORD) * p.BK + n // WORD * (p.BK // SUBS)
    return gl.where(gl.expand_dims(start < p.k_len, 0), raw, float("-inf"))


@gluon.jit
def seen_only(raw, high, step, p):
    """Sub-scores, -inf where a row sees no key of the block: none may become what a row's weights are relative to."""
    n = gl.arange(0, SUBS * WORD, gl.SliceLayout(0, SCORES))
    start = (step * WORD + n % WORD) * p.BK
    high = gl.convert_layout(high, gl.SliceLayout(1, SCORES), assert_trivial=True)
    return gl.where(gl.expand_dims(start, 0) < gl.expand_dims(high, 1), raw, float("-inf"))


@gluon.jit
def in_thread_best(raw):
    """The largest of the scores that a thread holds of each row, [64, 4]."""
    best = gl.max(raw.reshape([ROWS, SUBS * WORD // 8, 8]), 1)
    return gl.convert_layout(gl.max(best.reshape([ROWS, 4, 2]), 2), GROUPS, assert_trivial=True)


@gluon.jit
def in_thread(x, LARGEST: gl.constexpr):
    """The sum of the weights that a thread holds of each row, or the largest, [64, 4]."""
    if LARGEST:
        x = gl.max(gl.max(x.reshape([ROWS, WORD // 8, 8]), 1).reshape([ROWS, 4, 2]), 2)
    else:
        x = gl.sum(gl.sum(x.reshape([ROWS, WORD // 8, 8]), 1).reshape([ROWS, 4, 2]), 2)
    return gl.convert_layout(x, GROUPS, assert_trivial=True)


@gluon.jit
def weights(raw, shift, step, p, MASK: gl.constexpr):
    """Means of each block's exponentials relative to 2^shift, [64, 32]."""
    shift = gl.expand_dims(gl.convert_layout(shift + LOG_SUBS, gl.SliceLayout(1, SCORES), assert_trivial=True), 1)
    parts = exp2(raw * p.scale - shift).reshape([ROWS, SUBS, WORD])
    weight = gl.convert_layout(gl.sum(parts, 1), WEIGHTS, assert_trivial=True)
    if MASK:  # some blocks are not whole
        left = p.k_len - (step * WORD + gl.arange(0, WORD, gl.SliceLayout(0, WEIGHTS))) * p.BK
        LENGTH: gl.constexpr = p.BK // SUBS
        count = gl.minimum((gl.maximum(left, 1) + LENGTH - 1) // LENGTH, SUBS)
        weight *= gl.expand_dims(SUBS / count.to(gl.float32), 0)
    return weight


@gluon.jit
def sees(high, step, p):
    """Whether rows that see keys up to `high` see some key of each block of a step, in the layout of a mask."""
    LAYOUT: gl.constexpr = high.type.layout.parent
    block = step * WORD + gl.arange(0, WORD, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(block * p.BK, 0) < gl.expand_dims(high, 1)


@gluon.jit
def follow_both(best, total, peak, top):
    """The rows' best, and what is relative to it, after a step whose largest scores are `top`."""
    CODE: gl.constexpr = follow_code(2, SLACK)
    return gl.inline_asm_elementwise(
        CODE, "=f,=f,=f,=f,=f,=f,f,f,0,1,2,3,4,5", [top, best, total, peak],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def measure_step(best, total, peak, q, high, step, p, s, MASK: gl.constexpr):
    """Fold a step into each thread's part of its rows' totals and largest weights, [64, 4]."""
    raw = start_scores(q, step, p, s)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    leave(step, p, s)
    if MASK:
        raw = seen_only(filled_only(raw, step, p), high, step, p)
    best, total, peak = follow_both(best, total, peak, in_thread_best(raw) * p.scale)
    shift = gl.convert_layout(gl.max(best, 1), ROW, assert_trivial=True)
    weight = weights(raw, shift, step, p, MASK)
    return best, total + in_thread(weight, False), gl.maximum(peak, in_thread(weight, True))


@gluon.jit
def cut_of(total, peak, head, p):
    """A weight that is not below its row's cut is claimed; all are where a total says nothing."""
    cut = peak * BELOW_PEAK
    if p.USE_THRESHOLD:
        # "exceeds": not below the next float up
        exceeds = (total * gl.load(p.THRESHOLD + head)).to(gl.int32, bitcast=True) + 1
        cut = gl.minimum(cut, exceeds.to(gl.float32, bitcast=True))
    if p.USE_GAP:
        cut = gl.minimum(cut, peak * exp2(peak * 0 - gl.load(p.GAP + head) * LOG2_E))
    return gl.where(total < float("inf"), cut, float("nan"))


@gluon.jit
def factor_of(total):
    """What makes shares of weights, which are means over the sub-rows that judge anything."""
    judges = (total > 0) & (total < float("inf"))
    mates = with_mates(judges.to(gl.float32))
    return gl.where(judges, 1.0 / (gl.where(judges, total, 1.0) * gl.maximum(mates, 1.0)), 0.0)


@gluon.jit
def blocks_below(stop, step):
    """Those of a step's blocks that come before block `stop`, as a word."""
    count = gl.minimum(gl.maximum(stop - step * WORD, 0), WORD)
    return gl.where(count == WORD, -1, (1 << (count & (WORD - 1))) - 1)


@gluon.jit
def always_kept(query_block, broken, step, p):
    """What is kept of each query block whatever it weighs, as a word; and what of it some row sees."""
    top = query_block * p.BQ + (p.k_len - p.q_len) + p.right
    bottom = gl.minimum(query_block * p.BQ + p.BQ, p.q_len) - 1 + (p.k_len - p.q_len) + p.right
    kept = blocks_below(p.sinks, step) | broken
    if p.RIGHT_EDGE:  # the last blocks that its rows see
        edge = blocks_below(bottom // p.BK + 1, step) & ~blocks_below(gl.maximum(top, 0) // p.BK, step)
        kept = kept | gl.where((bottom >= 0) & (top < p.k_len), edge, 0)
    seen = gl.maximum(gl.minimum(bottom + 1, p.k_len), 0)
    return kept, blocks_below((seen + p.BK - 1) // p.BK, step)


@gluon.jit
def probed_shares(query_block, bh, step, p):
    """What sampled rows give to each block of a step, [16, 32]; those of the block before count."""
    LAYOUT: gl.constexpr = query_block.type.layout.parent
    block = step * WORD + gl.arange(0, WORD, gl.SliceLayout(0, LAYOUT))
    width = p.words * WORD
    place = p.SHARES + (bh - p.first_head).to(gl.int64) * p.share_rows * width
    place += gl.expand_dims(query_block * width, 1) + gl.expand_dims(block, 0)
    there = gl.expand_dims(query_block * p.BQ < p.q_len, 1) & gl.expand_dims(block >= 0, 0)
    before = gl.load(place, mask=there, other=0.0).to(gl.float32)
    own = gl.load(place + width, mask=there, other=0.0).to(gl.float32)
    return (own + NEIGHBOUR * before) / (1 + NEIGHBOUR)


@gluon.jit
def keep_step(q, shift, cut, factor, high, asked, first, bh, c, step, p, s, MASK: gl.constexpr):
    """A word of each query block's mask: what any sub-row claims, what has a large share, what is always kept."""
    LAYOUT: gl.constexpr = over_sub_rows(gl.zeros([ROWS, WORD], gl.float32, WEIGHTS)).type.layout
    query_block = first + gl.arange(0, QUERY_BLOCKS, gl.SliceLayout(1, LAYOUT))
    probed = gl.zeros([QUERY_BLOCKS, WORD], gl.float32, LAYOUT)
    if p.USE_PROBE:
        probed = probed_shares(query_block, bh, step, p)  # before the products are waited for
    raw = start_scores(q, c, p, s)
    stage, _ = ring(c, p)
    broken = word_of(s.broken, stage, 4)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    leave(c, p, s)
    if MASK:
        raw = filled_only(raw, step, p)
    weight = weights(raw, shift, step, p, MASK)
    share = weight * gl.expand_dims(factor, 1) if p.USE_PROBE else gl.zeros_like(weight)
    share = gl.where(weight < gl.expand_dims(cut, 1), share, CLAIMED)
    if MASK:
        share = gl.where(sees(high, step, p), share, 0.0)
    kept = (over_sub_rows(share) + probed > asked).to(gl.int32)
    word = gl.sum(kept << gl.expand_dims(gl.arange(0, WORD, gl.SliceLayout(0, LAYOUT)), 0), 1)
    always, seen = always_kept(query_block, broken, step, p)
    word = word | always
    if MASK:
        word = word & seen
    real = query_block * p.BQ < p.q_len
    gl.store(p.BITS + (bh.to(gl.int64) * p.q_slots + query_block) * p.words + step, word, mask=real)


@gluon.jit
def consumer(wg: gl.constexpr, heads_here, p, s):
    """One warpgroup: its 16 query blocks of the program's tile."""
    t = own_tile(heads_here, p)
    load_queries(t, wg, p, s)
    q = s.q.index(wg)
    first = t.first + wg * QUERY_BLOCKS
    sub_row = first * SUBS + sub_row_of(gl.arange(0, ROWS, ROW))
    high = keys_seen((sub_row + 1) * (p.BQ // SUBS) - 1, p)
    high = gl.where(sub_row * (p.BQ // SUBS) < p.q_len, high, 0)
    steps = steps_of(first, QUERY_BLOCKS, p)
    # All rows see every key of the steps before; rows that are not there do not count.
    edge = gl.minimum(keys_seen(first * p.BQ + p.BQ // SUBS - 1, p) // (WORD * p.BK), steps)

    best = gl.full([ROWS, 4], NOTHING, gl.float32, GROUPS)
    total = gl.zeros([ROWS, 4], gl.float32, GROUPS)
    peak = gl.zeros([ROWS, 4], gl.float32, GROUPS)
    for step in range(edge):
        best, total, peak = measure_step(best, total, peak, q, high, step, p, s, False)
    for step in range(edge, steps):
        best, total, peak = measure_step(best, total, peak, q, high, step, p, s, True)
    pass_over(steps, t.steps, p, s)

    head = t.bh % p.heads
    shift = gl.convert_layout(gl.max(best, 1), ROW, assert_trivial=True)
    row_total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True)
    row_peak = gl.convert_layout(gl.max(peak, 1), ROW, assert_trivial=True)
    # Rows that are not there, in steps that are seen whole, were measured like others: they say nothing.
    row_total = gl.where(high > 0, row_total, 0.0)
    cut = gl.where(high > 0, cut_of(row_total, row_peak, head, p), float("inf"))
    factor, asked = row_total, p.scale * 0
    if p.USE_PROBE:
        factor = factor_of(row_total)  # twice the mean of both kinds of shares is compared
        length = gl.maximum(p.k_len, FULL_LENGTH).to(gl.float32)
        asked = 2 * gl.load(p.PROBE + head) / gl.sqrt(length / FULL_LENGTH)
    for step in range(edge):
        keep_step(q, shift, cut, factor, high, asked, first, t.bh, t.steps + step, step, p, s, False)
    for step in range(edge, steps):
        keep_step(q, shift, cut, factor, high, asked, first, t.bh, t.steps + step, step, p, s, True)
    pass_over(t.steps + steps, 2 * t.steps, p, s)
    block = first + gl.arange(0, QUERY_BLOCKS, gl.SliceLayout(1, WEIGHTS))
    place = p.BITS + (t.bh.to(gl.int64) * p.q_slots + block) * p.words
    for word in range(steps, p.words):  # blocks that no row sees
        gl.store(
            place + word, gl.zeros([QUERY_BLOCKS], gl.int32, gl.SliceLayout(1, WEIGHTS)), mask=block * p.BQ < p.q_len
        )


@gluon.jit
def pass_over(begin, end, p, s):
    """Steps that only other warpgroups' rows see."""
    for c in range(begin, end):
        stage, parity = ring(c, p)
        mbarrier.wait(s.full.index(stage), parity)
        # No products keep the warps together here: one that falls behind by a turn of the ring would wait for ever.
        wait_for_all()
        mbarrier.arrive(s.empty.index(stage), count=1)


@gluon.jit
def first_consumer(heads_here, p, s):
    consumer(0, heads_here, p, s)


@gluon.jit
def second_consumer(heads_here, p, s):
    consumer(1, heads_here, p, s)


@gluon.jit
def third_consumer(heads_here, p, s):
    consumer(2, heads_here, p, s)


@gluon.jit
def fourth_consumer(heads_here, p, s):
    consumer(3, heads_here, p, s)


LENGTHS = ["heads", "group", "q_len", "k_len", "q_slots", "k_slots", "words", "right", "sinks", "share_rows",
           "first_head", "heads_here", "scale"]  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def select(
    k_boxes,  # bfloat16 [B Hkv 4, k_slots, D]
    Q_MEANS, V_FINITE,  # bfloat16 [B, Hq, q_slots, 4, D]; int8 [B, Hkv, k_slots]
    THRESHOLD, GAP, PROBE,  # settings per query head
    SHARES,  # as the probe left them
    BITS,  # output: int32 [B, Hq, q_slots, words]
    heads, group, q_len, k_len, q_slots, k_slots, words, right, sinks, share_rows, first_head, heads_here, scale,
    D: gl.constexpr, DP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr,
    USE_THRESHOLD: gl.constexpr, USE_GAP: gl.constexpr, USE_PROBE: gl.constexpr, RIGHT_EDGE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    p = Problem(
        heads, group, q_len, k_len, q_slots, k_slots, words, right, sinks, share_rows, first_head, scale, Q_MEANS,
        V_FINITE, THRESHOLD, GAP, PROBE, SHARES, BITS, D, DP, BQ, BK, WGS, STAGES, USE_THRESHOLD, USE_GAP, USE_PROBE,
        RIGHT_EDGE,
    )  # fmt: skip
    s = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [WGS, ROWS, DP], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, SUBS, WORD, DP], k_boxes.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(STAGES, 1), barriers(STAGES, WGS),
    )  # fmt: skip
    fence_async_shared()
    if WGS == 4:
        gl.warp_specialize([
            (first_consumer, (heads_here, p, s)), (second_consumer, (heads_here, p, s)),
            (third_consumer, (heads_here, p, s)), (fourth_consumer, (heads_here, p, s)),
            (producer, (k_boxes, heads_here, p, s)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
    elif WGS == 2:
        gl.warp_specialize([
            (first_consumer, (heads_here, p, s)), (second_consumer, (heads_here, p, s)),
            (producer, (k_boxes, heads_here, p, s)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([(first_consumer, (heads_here, p, s)), (producer, (k_boxes, heads_here, p, s))], [1], [24])
