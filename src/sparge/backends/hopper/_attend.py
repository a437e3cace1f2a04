"""Block-sparse attention for sm_90 in Gluon: int8 scores, e4m3 values.

One producer warp fills a ring of K and V stages by TMA; WGS consumer warpgroups of 64 query rows read them. A step
takes 128 keys: two 64-key blocks of the tile's list, or one of 128. Lists descend, so the blocks that cut the diagonal
or the end come first: one loop masks, the other does not. Programs stay on their multiprocessor and draw tiles by
ticket, so that rows with much work and rows with little even out.

The softmax lives in base 2, with every scale folded into the exponent's argument. Probabilities are relative to 2^best,
where best is the row's largest score so far; it follows only jumps that e4m3 has no room for, so that most steps shrink
nothing. Rows are summed by the tensor core, by a product with ones, which gives what rounded probabilities should be
divided by. It adds e4m3 products with few bits, so every few steps its sums join float32 ones in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the older name, before Triton 3.9

ROWS = gl.constexpr(64)  # of one warpgroup
UNIT = gl.constexpr(64)  # keys that share a scale
P_SHIFT = gl.constexpr(8.0)  # e4m3 probabilities are scaled by 2^8
HIDDEN = gl.constexpr(-0x7FFFFF00)  # below every sum of products
NOTHING = gl.constexpr(-1.0e30)  # below every score, and finite
PROMOTE = gl.constexpr(8)  # steps whose sums stay in the tensor core
END = gl.constexpr(-1)  # the ticket after the last tile
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
HALF_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
LANES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))  # what one thread holds of eight columns
ROW = gl.constexpr(gl.SliceLayout(1, HALF_SCORES))


@aggregate
class Problem:
    """What the launch says: shapes, addresses, compile-time choices."""

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    q_blocks: gl.tensor  # that have lists
    first_block: gl.tensor
    k_blocks: gl.tensor
    padded: gl.tensor
    tiles: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    COUNTS: gl.tensor
    LISTS: gl.tensor
    TICKETS: gl.tensor
    Q_SCALE: gl.tensor
    K_SCALE: gl.tensor
    VALID: gl.tensor
    D: gl.constexpr
    DVP: gl.constexpr
    WGS: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr
    MASK_ALL: gl.constexpr
    HAS_VALID: gl.constexpr
    WRITE_LSE: gl.constexpr
    SLACK: gl.constexpr  # how far a score may exceed the row's best, in bits, before that follows; below log2(448) - 8

    @gluon.constexpr_function
    def __init__(
        self, heads, group, q_len, k_len, q_blocks, first_block, k_blocks, padded, tiles, left, right, scale,
        COUNTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, D, DVP, WGS, BQ, BK, STAGES, MASK_ALL, HAS_VALID, WRITE_LSE,
        SLACK,
    ):  # fmt: skip
        self.heads, self.group, self.q_len, self.k_len = heads, group, q_len, k_len
        self.q_blocks, self.first_block, self.k_blocks, self.padded = q_blocks, first_block, k_blocks, padded
        self.tiles, self.left, self.right, self.scale = tiles, left, right, scale
        self.COUNTS, self.LISTS, self.TICKETS = COUNTS, LISTS, TICKETS
        self.Q_SCALE, self.K_SCALE, self.VALID = Q_SCALE, K_SCALE, VALID
        self.D, self.DVP, self.WGS, self.BQ, self.BK = map(gl.constexpr, (D, DVP, WGS, BQ, BK))
        self.STAGES, self.MASK_ALL = map(gl.constexpr, (STAGES, MASK_ALL))
        self.HAS_VALID, self.WRITE_LSE, self.SLACK = map(gl.constexpr, (HAS_VALID, WRITE_LSE, SLACK))


@aggregate
class Shared:
    """Shared memory, and a pair of barriers for each thing that is handed over in it."""

    q: gl.shared_memory_descriptor  # [2 WGS, 64, D]
    k: gl.shared_memory_descriptor  # [STAGES, 128, D]
    v: gl.shared_memory_descriptor  # [2 STAGES, DVP, 64]
    ones: gl.shared_memory_descriptor  # [8, 64]
    exact: gl.shared_memory_descriptor  # [WGS, 64, DVP]
    scales: gl.shared_memory_descriptor  # [2 STAGES, 64]: of a stage's two units, once per row
    orders: gl.shared_memory_descriptor  # [2 * 3, 32]: a tile's ticket, how many blocks it lists, how many are masked
    slots: gl.shared_memory_descriptor  # [2, 32]: 0, 1
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    order_full: gl.shared_memory_descriptor
    order_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, ones, exact, scales, orders, slots,
        q_full, q_empty, full, empty, order_full, order_empty,
    ):  # fmt: skip
        self.q, self.k, self.v, self.ones, self.exact, self.scales = q, k, v, ones, exact, scales
        self.orders, self.slots = orders, slots
        self.q_full, self.q_empty, self.full, self.empty = q_full, q_empty, full, empty
        self.order_full, self.order_empty = order_full, order_empty


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@aggregate
class Tile:
    """Rows that share a list, and the steps that it takes. The first `masked` entries go the slower way."""

    bh: gl.tensor
    kv: gl.tensor  # which key/value head is read
    first_row: gl.tensor
    lists: gl.tensor
    masked: gl.tensor
    masked_steps: gl.tensor
    steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, bh, kv, first_row, lists, masked, masked_steps, steps):
        self.bh, self.kv, self.first_row, self.lists = bh, kv, first_row, lists
        self.masked, self.masked_steps, self.steps = masked, masked_steps, steps


@gluon.jit
def list_of(ticket, p):
    """Which list a tile follows, and the tile's number inside its head, heavy causal rows first."""
    PER_BLOCK: gl.constexpr = p.BQ // (64 * p.WGS)
    per_head = p.q_blocks * PER_BLOCK
    bh = ticket // per_head
    inside = per_head - 1 - ticket % per_head
    return bh, inside, (bh * p.q_blocks + inside // PER_BLOCK).to(gl.int64)


@gluon.jit
def tile_of(ticket, count, masked, p):
    PER_BLOCK: gl.constexpr = p.BQ // (64 * p.WGS)
    PER_STEP: gl.constexpr = 128 // p.BK
    bh, inside, slot = list_of(ticket, p)
    masked_steps = (masked + PER_STEP - 1) // PER_STEP
    kv = (bh // p.heads) * (p.heads // p.group) + (bh % p.heads) // p.group
    first_row = (p.first_block * PER_BLOCK + inside) * (64 * p.WGS)
    steps = masked_steps + (count - masked) // PER_STEP
    return Tile(bh, kv, first_row, p.LISTS + slot * p.k_blocks, masked, masked_steps, steps)


@gluon.jit
def lengths_of(ticket, p):
    """How many blocks a tile lists, and how many of them, the first ones, need masks: lists descend."""
    PER_STEP: gl.constexpr = 128 // p.BK
    LEADING: gl.constexpr = 64 * p.WGS // p.BK + 2  # entries that may cut the diagonal or the end; all are visible
    _, _, slot = list_of(ticket, p)
    count = gl.load(p.COUNTS + slot)
    masked = count
    if not p.MASK_ALL:
        first_row = tile_of(ticket, count, count, p).first_row
        lists = p.LISTS + slot * p.k_blocks
        last_free = gl.maximum(gl.minimum(p.k_len, first_row + (p.k_len - p.q_len) + p.right + 1), 0) // p.BK
        masked = count * 0
        for j in gl.static_range(LEADING):
            here = gl.load(lists + gl.minimum(j, gl.maximum(count - 1, 0)))
            masked += ((here >= last_free) & (j < count)).to(gl.int32)
        masked += (count - masked) % PER_STEP
    return count, masked


@aggregate
class Keys:
    """Where a step's two units of 64 keys begin. The second may not be real: an odd masked list repeats its last."""

    a: gl.tensor
    b: gl.tensor
    b_real: gl.tensor

    @gluon.constexpr_function
    def __init__(self, a, b, b_real):
        self.a, self.b, self.b_real = a, b, b_real


@gluon.jit
def keys_of(t, step, BK: gl.constexpr):
    b_real = step >= 0
    if BK == 128:
        a = gl.load(t.lists + step) * BK
        b = a + UNIT
    else:
        free = 2 * (step - t.masked_steps)
        first = gl.where(free < 0, 2 * step, t.masked + free)
        b_real = (free >= 0) | (first + 1 < t.masked)
        a = gl.load(t.lists + first) * BK
        b = gl.load(t.lists + gl.where(b_real, first + 1, first)) * BK
    return Keys(a, b, b_real)


# ---- the producer


@gluon.jit
def tell(order, value, s):
    s.orders.index(order).store(gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)


@gluon.jit
def hand_out(ticket, count, masked, turn, s):
    """Tell every consumer which tile is next, so that none has to look it up."""
    slot = turn & 1
    mbarrier.wait(s.order_empty.index(slot), ((turn >> 1) & 1) ^ 1)
    tell(3 * slot, ticket, s)
    tell(3 * slot + 1, count, s)
    tell(3 * slot + 2, masked, s)
    mbarrier.arrive(s.order_full.index(slot), count=1)


@gluon.jit
def scale_of(kv, key, p):
    """Of a unit; keys of scale 0 are 0 at any scale, but what hides them must stay below every score."""
    scale = gl.load(p.K_SCALE + kv * (p.padded // UNIT) + key // UNIT)
    return gl.where(scale == 0, 1.0, scale)


@gluon.jit
def load_step(k_boxes, v_boxes, c, kv, keys, p, s):
    """K, V and scales of two units of 64 keys, into a stage that every consumer has left."""
    once_per_row: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = c % p.STAGES
    a_scale = gl.full([ROWS], 0.0, gl.float32, once_per_row) + scale_of(kv, keys.a, p)
    b_scale = gl.full([ROWS], 0.0, gl.float32, once_per_row) + scale_of(kv, keys.b, p)
    full = s.full.index(stage)
    mbarrier.wait(s.empty.index(stage), ((c // p.STAGES) & 1) ^ 1)
    s.scales.index(2 * stage).store(a_scale)
    s.scales.index(2 * stage + 1).store(b_scale)
    mbarrier.expect(full, 2 * UNIT * (p.D + p.DVP))
    load_box(k_boxes, [kv * p.padded + keys.a, 0], full, s.k.index(stage).slice(0, UNIT))
    load_box(k_boxes, [kv * p.padded + keys.b, 0], full, s.k.index(stage).slice(UNIT, UNIT))
    load_box(v_boxes, [kv * p.DVP, keys.a], full, s.v.index(2 * stage))
    load_box(v_boxes, [kv * p.DVP, keys.b], full, s.v.index(2 * stage + 1))


@gluon.jit
def next_ticket(p):
    return gl.atomic_add(p.TICKETS, 1) + gl.num_programs(0)


@gluon.jit
def producer(q_boxes, k_boxes, v_boxes, p, s):
    c = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < p.tiles:
        count, masked = lengths_of(tile, p)
        t = tile_of(tile, count, masked, p)
        hand_out(tile, count, masked, turn, s)
        full = s.q_full.index(turn & 1)
        mbarrier.wait(s.q_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(full, p.WGS * ROWS * p.D)
        for w in gl.static_range(p.WGS):
            load_box(q_boxes, [t.bh * p.q_len + t.first_row + w * ROWS, 0], full, s.q.index((turn & 1) * p.WGS + w))
        following = tile
        for step in range(t.steps):
            if step == t.steps - 1:  # late, so that the tiles go round evenly; not later, for it takes its time
                following = next_ticket(p)
            load_step(k_boxes, v_boxes, c + step, t.kv, keys_of(t, step, p.BK), p, s)
        if t.steps == 0:
            following = next_ticket(p)
        c += t.steps
        turn += 1
        tile = following
    hand_out(END, 0, 0, turn, s)


# ---- the consumers


@gluon.jit
def told(order, s):
    return gl.max(s.orders.index(order).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def next_tile(turn, s):
    slot = turn & 1
    mbarrier.wait(s.order_full.index(slot), (turn >> 1) & 1)
    ticket = told(3 * slot, s)
    count = told(3 * slot + 1, s)
    masked = told(3 * slot + 2, s)
    mbarrier.arrive(s.order_empty.index(slot), count=1)
    return ticket, count, masked


@gluon.jit
def by_way_of_memory(slot, s):
    """slot, but the compiler cannot know."""
    return gl.max(s.slots.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def per_lane(x):
    """A number per row, where LANES holds it."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LANES), assert_trivial=True), 1)


@gluon.jit
def lane_max(x):
    """The largest integer a thread holds of each row, [64, 8]: nothing is exchanged, and three compare at once."""
    return gl.convert_layout(gl.max(x.reshape([ROWS, UNIT // 8, 8]), 1), LANES, assert_trivial=True).to(gl.float32)


@gluon.jit
def lane_sum(x):
    return gl.convert_layout(gl.sum(x.reshape([ROWS, UNIT // 8, 8]), 1), LANES, assert_trivial=True)


@gluon.jit
def halves(scores):
    """The two units of 64 keys; registers are renamed, nothing moves."""
    a, b = scores.reshape([ROWS, 2, UNIT]).permute([0, 2, 1]).split()
    a = gl.convert_layout(a, HALF_SCORES, assert_trivial=True)
    return a, gl.convert_layout(b, HALF_SCORES, assert_trivial=True)


@gluon.jit
def hidden_pairs(bh, rows, key, real, p):
    """bool [64, 64]: keys from `key` on that a row does not see."""
    n = gl.arange(0, UNIT, gl.SliceLayout(0, HALF_SCORES))
    column = gl.expand_dims(n, 0)
    offset = p.k_len - p.q_len
    high = gl.where(real, gl.minimum(rows + (offset + p.right), p.k_len - 1) - key, -1)
    hidden = column > gl.expand_dims(high, 1)
    if p.MASK_ALL:
        hidden = hidden | (column < gl.expand_dims(rows + (offset - p.left) - key, 1))
    if p.HAS_VALID:
        valid = p.VALID + (bh // p.heads).to(gl.int64) * p.k_len + key
        hidden = hidden | gl.expand_dims(gl.load(valid + n, mask=key + n < p.k_len, other=0) == 0, 0)
    return hidden


@gluon.jit
def probabilities(raw, factor, shift):
    """2^(score - shift) from sums of products, row by row."""
    zeros = gl.zeros([ROWS, UNIT], gl.float32, HALF_SCORES)
    return gl.exp2(gl.fma(raw.to(gl.float32), gl.expand_dims(factor, 1) + zeros, gl.expand_dims(-shift, 1) + zeros))


@gluon.jit
def as_operand(x, LAYOUT: gl.constexpr):
    """e4m3, tokens relabelled inside each sixteen as V is stored; no data moves between threads."""
    x8 = x.to(gl.float8e4nv).reshape([ROWS, UNIT // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, UNIT])
    return gl.convert_layout(x8, LAYOUT, assert_trivial=True)


@gluon.jit
def start_scores(q, stage, s):
    """Raw scores of a stage's 128 keys, under way."""
    nothing = gl.zeros([ROWS, 2 * UNIT], gl.int32, SCORES)
    return warpgroup_mma(q, s.k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def followed(a, b, a_factor, b_factor, best, SLACK: gl.constexpr):
    """The rows' best after two units, and what shrinks all before."""
    top = gl.maximum(lane_max(a) * per_lane(a_factor), lane_max(b) * per_lane(b_factor))
    top = gl.convert_layout(gl.max(top, 1), ROW, assert_trivial=True)
    best_now = gl.where(top > best + SLACK, top, best)
    return best_now, gl.exp2(best - best_now)


@gluon.constexpr_function
def shrink_code(count):
    """PTX: one thread's `count` sums times the factors of its two rows, skipped where no row of the warp shrinks."""
    first, second = f"${2 * count}", f"${2 * count + 2}"
    code = "{ .reg .pred some, other; "
    code += (
        f"setp.neu.f32 some, {first}, 0f3F800000; setp.neu.f32 other, {second}, 0f3F800000; or.pred some, some, other; "
    )
    code += "vote.sync.any.pred some, some, -1; @!some bra.uni DONE; "
    for i in range(count):
        code += f"mul.f32 ${i}, ${i}, {second if i % 4 > 1 else first}; "
    return code + "DONE: }"


@gluon.constexpr_function
def shrink_operands(count):
    """What is multiplied stays in its registers; the factor is given once per sum."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def shrunk(acc, total, alpha, p):
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    COUNT: gl.constexpr = p.DVP // 2
    alpha_v = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    alpha_v, acc = gl.broadcast(alpha_v, acc)
    acc = gl.inline_asm_elementwise(
        shrink_code(COUNT), shrink_operands(COUNT), [acc, alpha_v], dtype=gl.float32, is_pure=True, pack=COUNT
    )
    return acc, total * per_lane(alpha)


@gluon.jit
def start_values(acc, sums, x, v, p, s, FIRST: gl.constexpr):
    """acc + P V of a unit, and the rows' sums of this step, under way.

    The tensor core sums rounded probabilities; where a caller may combine results, the sums must be exact.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    x8 = as_operand(x, gl.DotOperandLayout(0, VALUES, 4))
    acc = warpgroup_mma(x8, v.permute((1, 0)), acc, is_async=True)
    if p.WRITE_LSE:
        sums += lane_sum(x)
    else:
        x8 = gl.convert_layout(x8, gl.DotOperandLayout(0, LANES, 4), assert_trivial=True)
        sums = warpgroup_mma(x8, s.ones.permute((1, 0)), sums, use_acc=not FIRST, is_async=True)
    return acc, sums


@gluon.jit
def wait_values(acc, total, p):
    if p.WRITE_LSE:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, total = warpgroup_mma_wait(0, deps=(acc, total))
    return acc, total


@gluon.jit
def promoted(acc, best, base, exact, p):
    """The float32 sums so far, relative to `base`, and the tensor core's since then, together."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    beta = gl.exp2(base - best)
    beta_v = gl.expand_dims(gl.convert_layout(beta, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    return gl.fma(exact.load(VALUES), beta_v + gl.zeros([ROWS, p.DVP], gl.float32, VALUES), acc)


@gluon.jit
def fold_step(acc, total, best, q, rows, q_scale, keys, c, t, p, s, MASK: gl.constexpr):
    """Fold a step, the program's c-th, into (acc, total, best), and wait for it."""
    stage = c % p.STAGES
    mbarrier.wait(s.full.index(stage), (c // p.STAGES) & 1)
    a_factor = q_scale * s.scales.index(2 * stage).load(ROW)
    b_factor = q_scale * s.scales.index(2 * stage + 1).load(ROW)
    a, b = halves(warpgroup_mma_wait(0, deps=(start_scores(q, stage, s),)))
    if MASK:
        a_hidden = hidden_pairs(t.bh, rows, keys.a, True, p)
        b_hidden = hidden_pairs(t.bh, rows, keys.b, keys.b_real, p)
        a = gl.where(a_hidden, HIDDEN, a)
        b = gl.where(b_hidden, HIDDEN, b)
    best_now, alpha = followed(a, b, a_factor, b_factor, best, p.SLACK)
    a_p = probabilities(a, a_factor, best_now - P_SHIFT)
    if MASK:  # what is hidden may be the best of all, or NaN if the row's scale is
        a_p = gl.where(a_hidden, 0.0, a_p)
    acc, total = shrunk(acc, total, alpha, p)
    acc, sums = start_values(acc, gl.zeros([ROWS, 8], gl.float32, LANES), a_p, s.v.index(2 * stage), p, s, True)
    b_p = probabilities(b, b_factor, best_now - P_SHIFT)  # while the tensor core takes the first unit
    if MASK:
        b_p = gl.where(b_hidden, 0.0, b_p)
    acc, sums = start_values(acc, sums, b_p, s.v.index(2 * stage + 1), p, s, False)
    acc, sums = wait_values(acc, sums, p)
    mbarrier.arrive(s.empty.index(stage), count=1)
    return acc, total + sums, best_now


@gluon.jit
def fold_steps(acc, total, best, base, q, rows, q_scale, t, first, last, c, exact, p, s, MASK: gl.constexpr):
    """Fold the tile's steps from first to last; the program's count of steps is c before the tile.

    What came before is in `exact`, relative to 2^base; after the tile's last step it has joined acc.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    if first < last:
        keys = Keys(last, last, last > 0)  # only masks ask
        if MASK:
            keys = keys_of(t, first, p.BK)
        begin = first
        while begin < last:
            end = gl.minimum(begin + PROMOTE, last)
            for step in range(begin, end):
                following = keys
                if MASK:
                    following = keys_of(t, gl.minimum(step + 1, last - 1), p.BK)  # on its way while this one is folded
                acc, total, best = fold_step(acc, total, best, q, rows, q_scale, keys, c + step, t, p, s, MASK)
                keys = following
            if begin > 0:
                acc = promoted(acc, best, base, exact, p)
            if end < t.steps:
                exact.store(acc)
                acc = gl.zeros([ROWS, p.DVP], gl.float32, VALUES)
                base = best
            begin = end
    return acc, total, best, base


@gluon.jit
def store_rows(acc, total, best, t, rows, p, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    row_total = gl.sum(total, 1) if p.WRITE_LSE else gl.max(total, 1)
    row_total = gl.convert_layout(row_total, ROW, assert_trivial=True)
    inverse = gl.where(row_total == 0, 0.0, 1.0 / row_total)  # a row that sees nothing gives 0; NaN stays NaN
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    dv = gl.arange(0, p.DVP, gl.SliceLayout(0, VALUES))
    v_scale = gl.load(V_SCALE + t.kv * DV + dv, mask=dv < DV, other=0.0)
    out = acc * inverse * gl.expand_dims(v_scale, 0)
    wide = t.bh.to(gl.int64)
    at = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    target = OUT + (wide // p.heads) * o_batch + (wide % p.heads) * o_head + at.to(gl.int64) * o_row
    there = (at < p.q_len) & gl.expand_dims(dv < DV, 0)
    gl.store(target + gl.expand_dims(dv, 0), out.to(OUT.dtype.element_ty), mask=there)
    if p.WRITE_LSE:
        place = wide * p.q_len + rows
        lse = (best + gl.log2(row_total) - P_SHIFT) / 1.4426950408889634
        lse += gl.load(LSE_TERM + place, mask=rows < p.q_len, other=0.0)  # what smoothing took from every score
        gl.store(LSE + place, gl.where(row_total == 0, float("-inf"), lse), mask=rows < p.q_len)


@gluon.jit
def consumer(wg: gl.constexpr, p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    """One warpgroup: its 64 rows of every tile the program draws."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    c = 0
    turn = 0
    ticket, count, masked = next_tile(turn, s)
    while ticket >= 0:
        t = tile_of(ticket, count, masked, p)
        rows = t.first_row + wg * ROWS + gl.arange(0, ROWS, ROW)
        q_scales = p.Q_SCALE + t.bh.to(gl.int64) * p.q_len
        q_scale = gl.load(q_scales + rows, mask=rows < p.q_len, other=0.0) * p.scale
        acc = gl.zeros([ROWS, p.DVP], gl.float32, VALUES)
        total = gl.zeros([ROWS, 8], gl.float32, LANES)
        best = gl.full([ROWS], NOTHING, gl.float32, ROW)
        exact = s.exact.index(wg)
        mbarrier.wait(s.q_full.index(turn & 1), (turn >> 1) & 1)
        q = s.q.index((turn & 1) * p.WGS + wg)
        acc, total, best, base = fold_steps(
            acc, total, best, best, q, rows, q_scale, t, 0, t.masked_steps, c, exact, p, s, True
        )
        if not p.MASK_ALL:
            # ptxas would take this address from the loop above even where that loop is passed over: hide the likeness.
            q = s.q.index(by_way_of_memory(turn & 1, s) * p.WGS + wg)
            acc, total, best, base = fold_steps(
                acc, total, best, base, q, rows, q_scale, t, t.masked_steps, t.steps, c, exact, p, s, False
            )
        c += t.steps
        mbarrier.arrive(s.q_empty.index(turn & 1), count=1)
        store_rows(acc, total, best, t, rows, p, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)
        turn += 1
        ticket, count, masked = next_tile(turn, s)


@gluon.jit
def first_consumer(p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(0, p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


@gluon.jit
def second_consumer(p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(1, p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


@gluon.jit
def third_consumer(p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(2, p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


LENGTHS = ["heads", "group", "q_len", "k_len", "q_blocks", "first_block", "k_blocks", "padded", "tiles", "left",
           "right", "scale", "o_batch", "o_head", "o_row"]  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def attend(
    q_boxes, k_boxes, v_boxes,  # int8 [B Hq Nq, D] and [B Hkv padded, D]; e4m3 [B Hkv DVP, padded]
    COUNTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, V_SCALE, LSE_TERM, OUT, LSE,  # TICKETS: a zero
    heads, group, q_len, k_len, q_blocks, first_block, k_blocks, padded, tiles, left, right, scale,
    o_batch, o_head, o_row,
    D: gl.constexpr, DVP: gl.constexpr, DV: gl.constexpr, WGS: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, MASK_ALL: gl.constexpr, HAS_VALID: gl.constexpr, WRITE_LSE: gl.constexpr,
    SLACK: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    p = Problem(
        heads, group, q_len, k_len, q_blocks, first_block, k_blocks, padded, tiles, left, right, scale,
        COUNTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, D, DVP, WGS, BQ, BK, STAGES, MASK_ALL, HAS_VALID, WRITE_LSE,
        SLACK,
    )  # fmt: skip
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, UNIT], gl.NVMMASharedLayout(64, 8, 2))
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    # as bits: ptxas 12.8 packs a converted constant wrongly
    ones.store(gl.full([8, UNIT], 0x38, gl.int8, flat).to(gl.float8e4nv, bitcast=True))
    slots = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(2):
        slots.index(i).store(gl.full([32], i, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    exact = gl.allocate_shared_memory(gl.float32, [WGS, ROWS, DVP], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    s = Shared(
        gl.allocate_shared_memory(gl.int8, [2 * WGS, ROWS, D], q_boxes.layout),
        gl.allocate_shared_memory(gl.int8, [STAGES, 2 * UNIT, D], k_boxes.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, DVP, UNIT], v_boxes.layout),
        ones, exact,
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [6, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])), slots,
        barriers(2, 1), barriers(2, WGS), barriers(STAGES, 1), barriers(STAGES, WGS), barriers(2, 1), barriers(2, WGS),
    )  # fmt: skip
    fence_async_shared()
    if WGS == 2:
        gl.warp_specialize([
            (first_consumer, (p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (second_consumer, (p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (producer, (q_boxes, k_boxes, v_boxes, p, s)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_consumer, (p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (second_consumer, (p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (third_consumer, (p, s, V_SCALE, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (producer, (q_boxes, k_boxes, v_boxes, p, s)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
