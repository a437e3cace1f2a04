"""Block-sparse attention for sm_90 in Gluon: int8 scores, e4m3 values.

One producer warp fills a ring of K and V stages by TMA, and looks up what goes with them: which tile is next, where
keys begin, their scales. WGS consumer warpgroups of 64 query rows read it all from shared memory. Lists begin with the
blocks that hold hidden keys (the diagonal, the end, padding), which steps of 128 keys mask. Whole steps take 256 keys
where there are registers for as many scores, since a warpgroup waits several times in each step, else 128; what fills
none is the tail, in steps of 128. Programs stay on their multiprocessor and draw tiles by ticket, so that rows with
much work and rows with little even out.

The softmax lives in base 2, with every scale folded into the exponent's argument. Probabilities are relative to 2^best,
where best is the row's largest score so far; it follows only jumps that e4m3 has no room for, so that most steps shrink
nothing. Where nothing is masked and no sum has to be exact for an LSE, probabilities are made without the exponential
unit, before anybody knows whether best still holds (`_powers`); in steps of 256 keys those of the first half are made
while the scores of the second are multiplied. Rows are summed by the tensor core, by a product with ones, which gives
what rounded probabilities should be divided by. It adds e4m3 products with few bits, so every few steps its sums join
float32 ones in shared memory, or, with more than 128 channels, in scratch that stays in L2.

The second stage asks, block by block, whether some row of the warpgroup has a score near enough to its best; if none
has, neither exponentials nor values are computed. Best is then the true maximum, as everywhere. Where all four units of
a wide step are wanted, that costs little but one exchange between warps.
"""

import triton.language as tl
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

from sparge.backends.hopper._powers import (
    UNSEEN,
    all_powers,
    first_powers,
    one_power,
    second_powers,
    start_of,
    two_powers,
)

# The older names, before Triton 3.9
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
wait_for_all = getattr(gl, "barrier", None) or gl.thread_barrier  # of the partition

ROWS = gl.constexpr(64)  # of one warpgroup
UNIT = gl.constexpr(64)  # keys that share a scale
P_SHIFT = gl.constexpr(8.0)  # e4m3 probabilities are scaled by 2^8
HIDDEN = gl.constexpr(-0x7FFFFF00)  # below every sum of products
NOTHING = gl.constexpr(-1.0e30)  # below every score, and finite
NO_MEAN = gl.constexpr(1.0e30)  # beyond every mean of e4m3 values
LONG = gl.constexpr(32768)  # keys
PROMOTE = gl.constexpr(16)  # steps whose sums stay in the tensor core
END = gl.constexpr(-1)  # the ticket after the last tile
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
HALF_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
LANES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))  # what one thread holds of eight columns
ROW = gl.constexpr(gl.SliceLayout(1, HALF_SCORES))
GROUPS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)  # one number for each row and thread that holds a part of it: a thread has those of two rows


@aggregate
class Problem:
    """What the launch says: shapes, addresses, compile-time choices."""

    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor  # of the longest sequence
    k_len: gl.tensor
    q_tokens: gl.tensor  # rows between one head and the next in per-token tensors
    k_tokens: gl.tensor
    q_blocks: gl.tensor  # that have lists
    first_block: gl.tensor
    k_blocks: gl.tensor
    k_slots: gl.tensor  # key blocks between one head and the next
    padded: gl.tensor
    tiles: gl.tensor
    whole: gl.tensor  # tiles that one program takes each; those after them are divided, with DIVIDED
    pieces: gl.tensor  # of each of those
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    COUNTS: gl.tensor
    CUTS: gl.tensor  # entries of each list that hold hidden keys; read if these come first
    LISTS: gl.tensor
    TICKETS: gl.tensor  # with DIVIDED, behind it, how many pieces of a warpgroup's rows are through
    Q_SCALE: gl.tensor
    K_SCALE: gl.tensor
    VALID: gl.tensor
    Q_ENDS: gl.tensor
    K_ENDS: gl.tensor
    V_FINITE: gl.tensor
    LAMBDA: gl.tensor
    SKIPPED: gl.tensor
    EXACT: gl.tensor  # sums that do not fit shared memory; with DIVIDED, what pieces came to
    D: gl.constexpr
    DVP: gl.constexpr
    WGS: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr
    CUTS_FIRST: gl.constexpr  # else the last that a row sees do, which lists begin with
    HAS_VALID: gl.constexpr
    WRITE_LSE: gl.constexpr
    PACKED: gl.constexpr
    SECOND: gl.constexpr
    SKIP_ROWS: gl.constexpr  # that share a count in SKIPPED
    SLACK: gl.constexpr  # how far a score may exceed the row's best, in bits, before that follows; below log2(448) - 8
    UNITS: gl.constexpr  # of 64 keys in a whole step, 2 or 4; steps that mask, and those of the tail, have 2
    TAIL: gl.constexpr  # entries that fill no whole step have steps of their own, else they are masked
    DIVIDED: gl.constexpr  # the last tiles, which would leave most programs idle
    ONES: gl.constexpr  # keys whose probabilities are summed by one product; votes leave no room for as many

    @gluon.constexpr_function
    def __init__(
        self, heads, group, q_len, k_len, q_tokens, k_tokens, q_blocks, first_block, k_blocks, k_slots, padded, tiles,
        whole, pieces, left, right, scale, COUNTS, CUTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, Q_ENDS, K_ENDS,
        V_FINITE, LAMBDA, SKIPPED, EXACT, D, DVP, WGS, BQ, BK, STAGES, CUTS_FIRST, HAS_VALID, WRITE_LSE, PACKED, SECOND,
        SKIP_ROWS, SLACK, UNITS, TAIL, DIVIDED,
    ):  # fmt: skip
        self.heads, self.group, self.q_len, self.k_len = heads, group, q_len, k_len
        self.q_tokens, self.k_tokens, self.Q_ENDS, self.K_ENDS = q_tokens, k_tokens, Q_ENDS, K_ENDS
        self.q_blocks, self.first_block, self.k_blocks, self.padded = q_blocks, first_block, k_blocks, padded
        self.tiles, self.left, self.right, self.scale = tiles, left, right, scale
        self.whole, self.pieces, self.DIVIDED = whole, pieces, gl.constexpr(DIVIDED)
        self.COUNTS, self.CUTS, self.LISTS, self.TICKETS = COUNTS, CUTS, LISTS, TICKETS
        self.Q_SCALE, self.K_SCALE, self.VALID = Q_SCALE, K_SCALE, VALID
        self.k_slots, self.V_FINITE, self.LAMBDA = k_slots, V_FINITE, LAMBDA
        self.SKIPPED, self.EXACT = SKIPPED, EXACT
        self.D, self.DVP, self.WGS, self.BQ, self.BK = map(gl.constexpr, (D, DVP, WGS, BQ, BK))
        self.STAGES, self.CUTS_FIRST, self.PACKED = map(gl.constexpr, (STAGES, CUTS_FIRST, PACKED))
        self.HAS_VALID, self.WRITE_LSE, self.SLACK = map(gl.constexpr, (HAS_VALID, WRITE_LSE, SLACK))
        self.SECOND, self.SKIP_ROWS, self.UNITS, self.TAIL = map(gl.constexpr, (SECOND, SKIP_ROWS, UNITS, TAIL))
        self.ONES = gl.constexpr(2 * 64 if SECOND else UNITS * 64)


@aggregate
class Shared:
    """Shared memory, and a pair of barriers for each thing that is handed over in it."""

    q: gl.shared_memory_descriptor  # [2 WGS, 64, D]
    k: gl.shared_memory_descriptor  # [STAGES, 64 UNITS, D]
    v: gl.shared_memory_descriptor  # [STAGES, DVP, 64 UNITS]
    ones: gl.shared_memory_descriptor  # [8, ONES]
    exact: gl.shared_memory_descriptor  # [WGS, 64, DVP]; unused with more than 128 channels
    votes: gl.shared_memory_descriptor  # [WGS, 256]: of the second stage
    ticket: gl.shared_memory_descriptor  # [8, 1]: two tiles, lengths of lists, how many entries are masked, pieces
    slots: gl.shared_memory_descriptor  # [2, 1]: 0, 1
    scales: gl.shared_memory_descriptor  # [UNITS STAGES, 1]: of the keys of a stage
    keys: gl.shared_memory_descriptor  # [2 STAGES, 1]: where the two units of a step that masks begin
    needed: gl.shared_memory_descriptor  # [STAGES, 1]: units that the second stage may not skip
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ticket_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, ones, exact, votes, ticket, slots, scales, keys, needed,
        q_full, q_empty, full, empty, ticket_full,
    ):  # fmt: skip
        self.q, self.k, self.v, self.ones, self.exact, self.ticket, self.slots = q, k, v, ones, exact, ticket, slots
        self.votes, self.scales, self.keys, self.needed = votes, scales, keys, needed
        self.q_full, self.q_empty, self.full, self.empty = q_full, q_empty, full, empty
        self.ticket_full = ticket_full


@gluon.jit
def word_of(x, slot, WARPS: gl.constexpr):
    """The number in a slot of shared memory, in every thread."""
    return gl.max(x.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def set_word(x, slot, value, WARPS: gl.constexpr):
    x.index(slot).store(gl.full([1], 0, x.dtype, gl.BlockedLayout([1], [32], [WARPS], [0])) + value)


@gluon.jit
def ring(c, p):
    """The stage of the program's c-th step, and the parity of the turn that the stage takes."""
    LOG: gl.constexpr = p.STAGES // 2  # of 2 or 4
    return c & (p.STAGES - 1), (c >> LOG) & 1


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def sequence(ENDS, batch, length, tokens):
    """The first token and the length of a packed sequence. Bad ends are cut, so that nothing is read outside."""
    first = gl.minimum(gl.maximum(gl.load(ENDS + batch), 0).to(gl.int32), tokens)
    stop = gl.minimum(gl.load(ENDS + batch + 1).to(gl.int32), tokens)
    return first, gl.minimum(gl.maximum(stop - first, 0), length)


@aggregate
class Place:
    """Where a tile's head is: its sequence's lengths, and where that starts in tensors of all sequences."""

    bh: gl.tensor
    kv: gl.tensor  # of the sequence and the key/value head that is read
    kv_row: gl.tensor  # of the head that is read, in the copies of K and V
    q_len: gl.tensor
    k_len: gl.tensor
    q_first: gl.tensor
    query: gl.tensor  # the first row in per-token tensors
    key: gl.tensor  # the first key in its head's copies

    @gluon.constexpr_function
    def __init__(self, bh, kv, kv_row, q_len, k_len, q_first, query, key):
        self.bh, self.kv, self.kv_row, self.q_len, self.k_len = bh, kv, kv_row, q_len, k_len
        self.q_first, self.query, self.key = q_first, query, key


@gluon.jit
def place_of(bh, p):
    batch = bh // p.heads
    head = bh % p.heads
    kv_head = head // p.group
    kv = batch * (p.heads // p.group) + kv_head
    if p.PACKED:
        q_first, q_len = sequence(p.Q_ENDS, batch, p.q_len, p.q_tokens)
        k_first, k_len = sequence(p.K_ENDS, batch, p.k_len, p.k_tokens)
        key = (k_first // 128 + batch) * 128  # copies of each sequence start at multiples of 128
        return Place(bh, kv, kv_head, q_len, k_len, q_first, head * p.q_tokens + q_first, key)
    return Place(bh, kv, kv, p.q_len, p.k_len, bh * 0, bh * p.q_len, bh * 0)


@aggregate
class Tile:
    """Rows that share a list, and the steps that it takes.

    The first `masked` entries go the slower way, `tail` ones that fill no whole step come next.
    """

    at: Place
    slot: gl.tensor  # of its query block among those that have lists
    first_row: gl.tensor
    lists: gl.tensor
    masked: gl.tensor
    masked_steps: gl.tensor
    tail: gl.tensor
    narrow_steps: gl.tensor  # those that mask, and those of the tail
    steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, at, slot, first_row, lists, masked, masked_steps, tail, narrow_steps, steps):
        self.at, self.slot, self.first_row, self.lists = at, slot, first_row, lists
        self.masked, self.masked_steps, self.steps = masked, masked_steps, steps
        self.tail, self.narrow_steps = tail, narrow_steps


@gluon.jit
def place_of_tile(ticket, p):
    """Its head, the slot of its query block among those that have lists, and its first row."""
    PER_BLOCK: gl.constexpr = p.BQ // (64 * p.WGS)
    per_head = p.q_blocks * PER_BLOCK
    bh = ticket // per_head
    inside = per_head - 1 - ticket % per_head  # heavy causal rows first
    slot = (bh * p.q_blocks + inside // PER_BLOCK).to(gl.int64)
    return place_of(bh, p), slot, (p.first_block * PER_BLOCK + inside) * (64 * p.WGS)


@gluon.jit
def look_up(ticket, p):
    """How long a tile's list is, and how many entries from the first on hold hidden keys."""
    LEADING: gl.constexpr = p.BQ // p.BK + 2  # entries that may cut the diagonal or the end; all are visible
    at, slot, first_row = place_of_tile(ticket, p)
    count = gl.load(p.COUNTS + slot)
    if p.PACKED:  # a shorter sequence has fewer lists
        count = gl.where(first_row < at.q_len, count, 0)
    if p.CUTS_FIRST:
        masked = gl.where(count > 0, gl.load(p.CUTS + slot), 0)
    else:
        lists = p.LISTS + slot * p.k_blocks
        last_free = gl.maximum(gl.minimum(at.k_len, first_row + (at.k_len - at.q_len) + p.right + 1), 0) // p.BK
        masked = count * 0
        for j in gl.static_range(LEADING):
            here = gl.load(lists + gl.minimum(j, gl.maximum(count - 1, 0)))
            masked += ((here >= last_free) & (j < count)).to(gl.int32)
    return count, masked


@gluon.jit
def tile_of(ticket, begin, count, masked, p):
    """A tile whose list begins at an entry, has so many, and hidden keys in as many of them."""
    PER_STEP: gl.constexpr = p.UNITS * UNIT // p.BK
    PER_NARROW: gl.constexpr = 2 * UNIT // p.BK
    at, slot, first_row = place_of_tile(ticket, p)
    odd = (count - masked) % PER_STEP
    whole = (count - masked) // PER_STEP
    tail = odd
    if not p.TAIL:
        masked += odd
        tail = count * 0
    masked_steps = (masked + PER_NARROW - 1) // PER_NARROW
    narrow_steps = masked_steps + (tail + PER_NARROW - 1) // PER_NARROW
    lists = p.LISTS + slot * p.k_blocks + begin
    return Tile(at, slot, first_row, lists, masked, masked_steps, tail, narrow_steps, narrow_steps + whole)


@gluon.jit
def piece_of(ticket, p):
    """A ticket's tile and piece; -1: the whole tile. Whole tiles come first, then pieces of the others."""
    piece = ticket * 0 - 1
    if p.DIVIDED:
        if ticket >= p.whole:
            piece = (ticket - p.whole) % p.pieces
            ticket = p.whole + (ticket - p.whole) // p.pieces
    return ticket, piece


@gluon.jit
def part_of_list(piece, count, masked, p):
    """Where a piece's list begins, how long it is, and how many entries are masked.

    Whole steps are shared out equally; the first piece has what is masked and the tail besides.
    """
    begin = count * 0
    if p.DIVIDED:
        if piece >= 0:
            PER_STEP: gl.constexpr = p.UNITS * UNIT // p.BK
            whole = (count - masked) // PER_STEP
            others = count - whole * PER_STEP
            begin, count = whole * piece // p.pieces * PER_STEP, whole * (piece + 1) // p.pieces * PER_STEP
            count -= begin
            if piece == 0:
                count += others
            else:
                begin += others
                masked *= 0
    return begin, count, masked


@gluon.jit
def second_is_real(t, step, BK: gl.constexpr, TAIL: gl.constexpr):
    """Whether a masked or tail step has two units: the second of an odd part of a list repeats the first."""
    if BK == 128:
        return step >= 0
    elif TAIL:
        return 2 * (step - t.masked_steps) + 1 < t.tail
    else:
        return 2 * step + 1 < t.masked


@gluon.jit
def keys_of(t, step, BK: gl.constexpr, MASK: gl.constexpr, TAIL: gl.constexpr = False):
    """Where a step's two units begin."""
    if BK == 128:
        a_key = gl.load(t.lists + step) * BK
        b_key = a_key + UNIT
    elif TAIL:
        at = 2 * (step - t.masked_steps)
        a_key = gl.load(t.lists + t.masked + at) * BK
        b_key = gl.load(t.lists + t.masked + gl.minimum(at + 1, t.tail - 1)) * BK
    elif MASK:
        a_key = gl.load(t.lists + 2 * step) * BK
        b_key = gl.load(t.lists + gl.minimum(2 * step + 1, t.masked - 1)) * BK
    else:
        pair = t.lists + t.masked + t.tail + 2 * (step - t.narrow_steps)
        a_key = gl.load(pair) * BK
        b_key = gl.load(pair + 1) * BK
    return a_key, b_key


@gluon.jit
def needed_units(t, keys, p):
    """Units whose values are not all finite, a bit each: who sees them must know."""
    needed = keys[0] * 0
    if p.SECOND:
        finite = p.V_FINITE + (t.at.kv_row * p.k_slots + t.at.key // p.BK).to(gl.int64)
        for i in gl.static_range(len(keys)):
            needed += (gl.load(finite + keys[i] // p.BK) == 0).to(gl.int32) << i
    return needed


@gluon.jit
def wide_keys(t, step, BK: gl.constexpr):
    """Where the four units of a step without masks begin."""
    if BK == 128:
        pair = t.lists + t.masked + t.tail + 2 * (step - t.narrow_steps)
        a_key = gl.load(pair) * BK
        c_key = gl.load(pair + 1) * BK
        return a_key, a_key + UNIT, c_key, c_key + UNIT
    else:
        four = t.lists + t.masked + t.tail + 4 * (step - t.narrow_steps)
        return gl.load(four) * BK, gl.load(four + 1) * BK, gl.load(four + 2) * BK, gl.load(four + 3) * BK


# ---- the producer


@gluon.jit
def hand_out(ticket, piece, count, masked, turn, s):
    """Tell every consumer which tile is next, and what was looked up about it: in words that they have left, as they
    have the queries of the last tile but one."""
    mbarrier.wait(s.q_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    set_word(s.ticket, turn & 1, ticket, 1)
    set_word(s.ticket, 2 + (turn & 1), count, 1)
    set_word(s.ticket, 4 + (turn & 1), masked, 1)
    set_word(s.ticket, 6 + (turn & 1), piece, 1)
    mbarrier.arrive(s.ticket_full.index(turn & 1), count=1)


@gluon.jit
def scales_of(keys, row, p):
    """Of two or four units of 64 keys."""
    a_scale = gl.load(p.K_SCALE + (row + keys[0]) // UNIT)
    b_scale = gl.load(p.K_SCALE + (row + keys[1]) // UNIT)
    if len(keys) == 2:
        return a_scale, b_scale
    else:
        c_scale = gl.load(p.K_SCALE + (row + keys[2]) // UNIT)
        d_scale = gl.load(p.K_SCALE + (row + keys[3]) // UNIT)
        return a_scale, b_scale, c_scale, d_scale


@gluon.jit
def load_step(k_boxes, v_boxes, c, t, keys, p, s, MASK: gl.constexpr):
    """K and V of units of 64 keys, and what consumers must know of them, into a stage that every consumer has left."""
    stage, parity = ring(c, p)
    full = s.full.index(stage)
    row = t.at.kv_row * p.padded + t.at.key
    scales = scales_of(keys, row, p)
    needed = needed_units(t, keys, p)
    mbarrier.wait(s.empty.index(stage), parity ^ 1)
    for i in gl.static_range(len(keys)):
        scale = scales[i]
        if MASK:  # keys of scale 0 are 0 at any scale, but what hides them must stay below every score
            scale = gl.where(scale == 0, 1.0, scale)
            set_word(s.keys, 2 * stage + i, keys[i], 1)
        set_word(s.scales, p.UNITS * stage + i, scale, 1)
    if p.SECOND:
        set_word(s.needed, stage, needed, 1)
    mbarrier.expect(full, len(keys) * UNIT * (p.D + p.DVP))
    for i in gl.static_range(len(keys)):
        load_box(k_boxes, [row + keys[i], 0], full, s.k.index(stage).slice(i * UNIT, UNIT))
    for i in gl.static_range(len(keys)):
        load_box(v_boxes, [t.at.kv_row * p.DVP, t.at.key + keys[i]], full, s.v.index(stage).slice(i * UNIT, UNIT, 1))


@gluon.jit
def producer(q_boxes, k_boxes, v_boxes, p, s):
    c = 0
    turn = 0
    ticket = gl.program_id(0)
    tickets = p.whole + (p.tiles - p.whole) * p.pieces
    while ticket < tickets:
        tile, piece = piece_of(ticket, p)
        count, masked = look_up(tile, p)
        begin, count, masked = part_of_list(piece, count, masked, p)
        hand_out(tile, piece, count, masked, turn, s)
        t = tile_of(tile, begin, count, masked, p)
        full = s.q_full.index(turn & 1)
        mbarrier.expect(full, p.WGS * ROWS * p.D)
        for w in gl.static_range(p.WGS):
            load_box(q_boxes, [t.at.query + t.first_row + w * ROWS, 0], full, s.q.index((turn & 1) * p.WGS + w))
        for step in range(t.masked_steps):
            load_step(k_boxes, v_boxes, c, t, keys_of(t, step, p.BK, True), p, s, True)
            c += 1
        if p.TAIL:
            for step in range(t.masked_steps, t.narrow_steps):
                load_step(k_boxes, v_boxes, c, t, keys_of(t, step, p.BK, False, True), p, s, False)
                c += 1
        for step in range(t.narrow_steps, t.steps):
            if p.UNITS == 4:
                load_step(k_boxes, v_boxes, c, t, wide_keys(t, step, p.BK), p, s, False)
            else:
                load_step(k_boxes, v_boxes, c, t, keys_of(t, step, p.BK, False), p, s, False)
            c += 1
        turn += 1
        ticket = gl.atomic_add(p.TICKETS, 1) + gl.num_programs(0)
    hand_out(END, END, 0, 0, turn, s)


# ---- the consumers


@gluon.jit
def next_tile(turn, wg: gl.constexpr, SCALED: gl.constexpr, p, s):
    """The next tile's number, the tile, and the scales of a warpgroup's rows."""
    mbarrier.wait(s.ticket_full.index(turn & 1), (turn >> 1) & 1)
    tile = word_of(s.ticket, turn & 1, 4)
    count = word_of(s.ticket, 2 + (turn & 1), 4)
    masked = word_of(s.ticket, 4 + (turn & 1), 4)
    t = tile_of(gl.maximum(tile, 0), 0, count, masked, p)  # lists are the producer's
    q_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
    if SCALED:
        rows = t.first_row + wg * ROWS + gl.arange(0, ROWS, ROW)
        there = (rows < t.at.q_len) & (tile >= 0)
        q_scale = gl.load(p.Q_SCALE + t.at.query.to(gl.int64) + rows, mask=there, other=0.0)
    return tile, t, q_scale


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
def hidden_pairs(at, rows, key, real, p):
    """bool [64, 64]: keys from `key` on that a row does not see."""
    n = gl.arange(0, UNIT, gl.SliceLayout(0, HALF_SCORES))
    column = gl.expand_dims(n, 0)
    offset = at.k_len - at.q_len
    high = gl.where(real, gl.minimum(rows + (offset + p.right), at.k_len - 1) - key, -1)
    hidden = column > gl.expand_dims(high, 1)
    if p.CUTS_FIRST:
        hidden = hidden | (column < gl.expand_dims(rows + (offset - p.left) - key, 1))
    if p.HAS_VALID:
        valid = p.VALID + (at.bh // p.heads).to(gl.int64) * at.k_len + key
        hidden = hidden | gl.expand_dims(gl.load(valid + n, mask=key + n < at.k_len, other=0) == 0, 0)
    return hidden


@gluon.jit
def some_shown(hidden):
    """bool [64]: rows that see one of a unit's keys."""
    return gl.max((~hidden).to(gl.int32), 1) != 0


@gluon.jit
def probabilities(raw, factor, shift):
    """2^(score - shift) from sums of products, row by row."""
    zeros = gl.zeros([ROWS, UNIT], gl.float32, HALF_SCORES)
    return gl.exp2(gl.fma(raw.to(gl.float32), gl.expand_dims(factor, 1) + zeros, gl.expand_dims(-shift, 1) + zeros))


@gluon.constexpr_function
def operand(DVP):
    """The layout of what values of so many channels are multiplied with."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVP, 32]), 4)


@gluon.jit
def relabelled(x, LAYOUT: gl.constexpr):
    """An operand, its tokens relabelled inside each sixteen as V is stored; no data moves between threads."""
    x = x.reshape([ROWS, UNIT // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, UNIT])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def start_scores(q, stage, s, HALF: gl.constexpr = 0):
    """Raw scores of 128 of a stage's keys, under way."""
    nothing = gl.zeros([ROWS, 2 * UNIT], gl.int32, SCORES)
    keys = s.k.index(stage).slice(HALF * 2 * UNIT, 2 * UNIT)
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def followed(a, b, a_factor, b_factor, best, ahead, SLACK: gl.constexpr):
    """The rows' best after two units; it stays where they exceed it by less than SLACK bits, and begins so many bits
    ahead of them."""
    top = gl.maximum(lane_max(a) * per_lane(a_factor), lane_max(b) * per_lane(b_factor))
    top = gl.convert_layout(gl.max(top, 1), ROW, assert_trivial=True)
    return gl.where(top > best + SLACK, top + gl.where(best < UNSEEN, ahead, 0.0), best)


@gluon.jit
def bits_ahead(p):
    """How far a row's first best lies ahead of what it has seen: more keys bring higher scores, and moving takes time.

    Whole, so that what it has seen comes out exact; and the fewer, the more keys there are, far below the best. None
    where it follows every score.
    """
    ahead = 2 - (p.k_len > LONG).to(gl.int32) - (p.k_len > 4 * LONG).to(gl.int32)
    return ahead if p.SLACK > 0 else p.k_len * 0


@gluon.jit
def per_thread(x):
    """A number per row, in all threads that hold a part of it."""
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, GROUPS), assert_trivial=True), 1)
    return x + gl.zeros([ROWS, 4], x.dtype, GROUPS)


@gluon.jit
def per_row(x):
    """Its largest number of all threads that hold a part of a row."""
    return gl.convert_layout(gl.max(x, 1), ROW, assert_trivial=True)


@gluon.jit
def per_number(x, like, RUN: gl.constexpr):
    """Numbers per row and thread for all that it holds of `like`, of whose columns RUN lie next to each other."""
    parts = like.reshape([ROWS, like.shape[1] // (4 * RUN), 4, RUN])
    OWN: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    x = gl.expand_dims(gl.expand_dims(gl.convert_layout(x, OWN, assert_trivial=True), 1), 3)
    x, _ = gl.broadcast(x, parts)
    return gl.convert_layout(x.reshape([ROWS, like.shape[1]]), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def follow_code(FOLLOWERS, SLACK):
    """PTX for a thread's two rows, best $0 $1, what is relative to it $2 $3 and so on, top of a step in the last two:
    where the row's top exceeds best by more than SLACK, best becomes it. Four threads hold a row; they ask each other
    only where a thread of the warp has such a top."""
    first_top = 2 + 2 * FOLLOWERS
    code = "{ .reg .pred p0, p1, some; .reg .f32 t0, t1, a0, a1, o; "
    for i in range(2):
        code += f"add.f32 t{i}, ${i}, {SLACK}; setp.gt.f32 p{i}, ${first_top + i}, t{i}; "
    code += "or.pred some, p0, p1; vote.sync.any.pred some, some, -1; @!some bra.uni DONE; "
    for i in range(2):
        top = f"${first_top + i}"
        code += f"shfl.sync.bfly.b32 o, {top}, 1, 31, -1; max.f32 a{i}, o, {top}; "
        code += f"shfl.sync.bfly.b32 o, a{i}, 2, 31, -1; max.f32 a{i}, o, a{i}; setp.gt.f32 p{i}, a{i}, t{i}; "
        code += f"sub.f32 o, ${i}, a{i}; ex2.approx.ftz.f32 o, o; "
        for follower in range(2 + i, first_top, 2):
            code += f"@p{i} mul.f32 ${follower}, ${follower}, o; "
        code += f"@p{i} mov.f32 ${i}, a{i}; "
    return code + "DONE: }"


@gluon.jit
def follow(best, follower, top, SLACK: gl.constexpr):
    """The rows' best, and what is relative to it, after a step whose groups' largest scores are `top`."""
    CODE: gl.constexpr = follow_code(1, SLACK)
    return gl.inline_asm_elementwise(
        CODE, "=f,=f,=f,=f,f,f,0,1,2,3", [top, best, follower], dtype=(gl.float32, gl.float32), is_pure=True, pack=2
    )


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
def shrunk(acc, total, alpha):
    """Sums times factors per row and thread."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    acc = gl.inline_asm_elementwise(
        shrink_code(COUNT), shrink_operands(COUNT), [acc, per_number(alpha, acc, 2)], dtype=gl.float32, is_pure=True,
        pack=COUNT,
    )  # fmt: skip
    return acc, total * per_number(alpha, total, 2)


@gluon.jit
def to_sum(x8):
    """Probabilities as an operand of the product with ones; nothing moves."""
    return gl.convert_layout(x8, gl.DotOperandLayout(0, LANES, 4), assert_trivial=True)


@gluon.jit
def beside(a, b):
    """Two operands of a product as one, b's keys after a's; registers are renamed, nothing moves."""
    both = gl.join(a, b).permute([0, 2, 1]).reshape([ROWS, 2 * a.shape[1]])
    return gl.convert_layout(both, a.type.layout, assert_trivial=True)


@gluon.jit
def start_values(acc, sums, p8, stage, FIRST: gl.constexpr, MORE: gl.constexpr, p, s):
    """acc + P V of a stage's units from FIRST on, and the sums of their rows, under way: as one product, which shares
    what it takes to begin one. With MORE, sums are added to.

    The tensor core sums rounded probabilities; where a caller may combine results, the sums must be exact.
    """
    values = s.v.index(stage).slice(FIRST * UNIT, p8.shape[1], 1)
    acc = warpgroup_mma(p8, values.permute((1, 0)), acc, is_async=True)
    if not p.WRITE_LSE:
        ones = s.ones.slice(0, p8.shape[1], 1)
        sums = warpgroup_mma(to_sum(p8), ones.permute((1, 0)), sums, use_acc=MORE, is_async=True)
    return acc, sums


@gluon.jit
def wait_values(acc, total, p):
    if p.WRITE_LSE:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, total = warpgroup_mma_wait(0, deps=(acc, total))
    return acc, total


@gluon.jit
def scratch_of(wg: gl.constexpr, p):
    """A warpgroup's float32 sums outside shared memory; each thread reads what it wrote itself."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, VALUES)), 1)
    channel = gl.expand_dims(gl.arange(0, p.DVP, gl.SliceLayout(0, VALUES)), 0)
    return p.EXACT + (gl.program_id(0) * p.WGS + wg) * (ROWS * p.DVP) + (row * p.DVP + channel)


@gluon.jit
def put_aside(acc, wg: gl.constexpr, p, s):
    if p.DVP > 128:
        gl.store(scratch_of(wg, p), acc)
    else:
        s.exact.index(wg).store(acc)


@gluon.jit
def promoted(acc, beta, wg: gl.constexpr, p, s):
    """The float32 sums so far, times beta, and the tensor core's since then, together."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    before = gl.load(scratch_of(wg, p)) if p.DVP > 128 else s.exact.index(wg).load(VALUES)
    return gl.fma(before, per_number(beta if len(beta.shape) == 2 else per_thread(beta), acc, 2), acc)


@gluon.jit
def union(a, b):
    return a | b


@gluon.jit
def of_all_warps(flags, board):
    """The union of flags, of which each warp's threads have the same, in every thread of the warpgroup."""
    board.reshape([ROWS, 4]).store(flags.to(gl.int8))  # a byte of each row and thread
    WARPS: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    words = board.reshape([4, ROWS]).slice(0, 1, 1).load(WARPS).to(gl.int32)
    return gl.reduce(gl.reduce(words, 0, union), 0, union)


@gluon.jit
def of_all_rows(flags, board):
    """The union of the rows' flags, in every thread of the warpgroup: one instruction per warp, then four bytes."""
    flags = gl.inline_asm_elementwise(
        "{ .reg .b32 x; or.b32 x, $2, $3; redux.sync.or.b32 x, x, 0xffffffff; mov.b32 $0, x; mov.b32 $1, x; }",
        "=r,=r,r,r", [flags], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return of_all_warps(per_thread(flags), board)


@gluon.jit
def wanted_units(a, b, a_factor, b_factor, a_sees, b_sees, best, lam, needed, board, BK: gl.constexpr):
    """The second stage's choice for a warpgroup: the rows' best; units it wants (1, 2: a, b); blocks it could skip.

    Whatever is not below lam is wanted, NaN too. A block is judged after those before it.
    """
    a_top = gl.convert_layout(gl.max(lane_max(a) * per_lane(a_factor), 1), ROW, assert_trivial=True)
    b_top = gl.convert_layout(gl.max(lane_max(b) * per_lane(b_factor), 1), ROW, assert_trivial=True)
    a_top = gl.where(a_sees, a_top, NOTHING)
    b_top = gl.where(b_sees, b_top, NOTHING)
    after_a = gl.maximum(best, a_top)
    after_b = gl.maximum(after_a, b_top)
    a_broken = a_sees & ((a_top != a_top) | (a_factor != a_factor))
    b_broken = b_sees & ((b_top != b_top) | (b_factor != b_factor))
    if BK == 128:
        a_broken = a_broken | b_broken
        b_broken = a_broken
        a_top = gl.maximum(a_top, b_top)
        b_top = a_top
        after_a = after_b
        a_sees = a_sees | b_sees
        b_sees = a_sees
    a_asks = a_broken | (a_sees & (a_top - after_a >= lam))
    b_asks = b_broken | (b_sees & (b_top - after_b >= lam))
    votes = a_asks.to(gl.int32) + 2 * b_asks.to(gl.int32) + 4 * a_sees.to(gl.int32) + 8 * b_sees.to(gl.int32)
    votes = of_all_rows(votes, board)
    wanted = (votes & 3) | needed
    idle = (votes >> 2) & ~wanted
    return after_b, wanted, (idle & 1) + (idle >> 1) if BK == 64 else idle & 1


@gluon.jit
def with_values(acc, total, a_p, b_p, alpha, stage, p, s):
    """(acc, total) shrunk and with a step's probabilities, and what they weigh."""
    DOT: gl.constexpr = operand(p.DVP)
    a8, b8 = relabelled(a_p.to(gl.float8e4nv), DOT), relabelled(b_p.to(gl.float8e4nv), DOT)
    acc, total = shrunk(acc, total, per_thread(alpha))
    sums = gl.zeros([ROWS, 8], gl.float32, LANES)
    acc, sums = start_values(acc, sums, beside(a8, b8), stage, 0, False, p, s)
    if p.WRITE_LSE:
        sums = lane_sum(a_p) + lane_sum(b_p)
    acc, sums = wait_values(acc, sums, p)
    return acc, total + sums


@gluon.jit
def fold_step(acc, total, best, skipped, q, rows, q_scale, lam, step, c, t, wg: gl.constexpr, p, s, MASK: gl.constexpr,
              TAIL: gl.constexpr):  # fmt: skip
    """Fold a step of 128 keys into (acc, total, best), and wait for it; the program's count is c before the tile."""
    stage, parity = ring(c + step, p)
    mbarrier.wait(s.full.index(stage), parity)
    raw = start_scores(q, stage, s)
    a_factor = q_scale * word_of(s.scales, p.UNITS * stage, 4)
    b_factor = q_scale * word_of(s.scales, p.UNITS * stage + 1, 4)
    b_real = second_is_real(t, step, p.BK, TAIL)
    a, b = halves(warpgroup_mma_wait(0, deps=(raw,)))
    if MASK:
        a_hidden = hidden_pairs(t.at, rows, word_of(s.keys, 2 * stage, 4), True, p)
        b_hidden = hidden_pairs(t.at, rows, word_of(s.keys, 2 * stage + 1, 4), b_real, p)
        a = gl.where(a_hidden, HIDDEN, a)
        b = gl.where(b_hidden, HIDDEN, b)
    if p.SECOND:
        a_sees = rows < t.at.q_len
        b_sees = a_sees
        if MASK:
            a_sees = a_sees & some_shown(a_hidden)
            b_sees = b_sees & some_shown(b_hidden)
        needed = word_of(s.needed, stage, 4)
        if TAIL:
            b_sees = b_sees & b_real
            needed = gl.where(b_real, needed, needed & 1)
        best_now, wanted, idle = wanted_units(
            a, b, a_factor, b_factor, a_sees, b_sees, best, lam, needed, s.votes.index(wg), p.BK
        )
        skipped += idle
        if wanted != 0:
            a_p = probabilities(a, a_factor, best_now + gl.where((wanted & 1) != 0, -P_SHIFT, float("inf")))
            b_p = probabilities(b, b_factor, best_now + gl.where((wanted & 2) != 0, -P_SHIFT, float("inf")))
            if MASK:
                a_p = gl.where(a_hidden, 0.0, a_p)
                b_p = gl.where(b_hidden, 0.0, b_p)
            acc, total = with_values(acc, total, a_p, b_p, gl.exp2(best - best_now), stage, p, s)
            best = best_now
    else:
        best_now = followed(a, b, a_factor, b_factor, best, bits_ahead(p).to(gl.float32), p.SLACK)
        b_shift = gl.where(b_real, -P_SHIFT, float("inf")) if TAIL else -P_SHIFT
        a_p, b_p = probabilities(a, a_factor, best_now - P_SHIFT), probabilities(b, b_factor, best_now + b_shift)
        if MASK:  # what is hidden may be the best of all, or NaN if the row's scale is
            a_p = gl.where(a_hidden, 0.0, a_p)
            b_p = gl.where(b_hidden, 0.0, b_p)
        acc, total = with_values(acc, total, a_p, b_p, gl.exp2(best - best_now), stage, p, s)
        best = best_now
    mbarrier.arrive(s.empty.index(stage), count=1)
    return acc, total, best, skipped


@gluon.jit
def unit_top(raw, factor):
    """The largest score that a thread holds of each row, [64, 4]: as lane_max, with one number per row to scale."""
    tops = gl.max(raw.reshape([ROWS, UNIT // 8, 8]), 1)
    tops = gl.convert_layout(gl.max(tops.reshape([ROWS, 4, 2]), 2), GROUPS, assert_trivial=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, GROUPS), assert_trivial=True)
    return tops.to(gl.float32) * gl.expand_dims(factor, 1)


@gluon.jit
def shifted_powers(raw, factor, offset):
    """2^(raw * factor + offset), of a factor per row and an offset per row and thread."""
    factor = gl.expand_dims(factor, 1) + gl.zeros([ROWS, UNIT], gl.float32, HALF_SCORES)
    return gl.exp2(gl.fma(raw.to(gl.float32), factor, per_number(offset, raw, 2)))


@gluon.constexpr_function
def judge_code(BK):
    """PTX of the second stage's choice for a thread's two rows: best $0 $1, what is relative to it $2 $3 and flags $4
    $5, of tops of four units $6 to $13, and thresholds $14 $15, which are infinite for rows that do not exist.

    Flags are bits of units, of blocks of BK keys, that some row of the warp wants, in list order, each judged after
    those before it. Where no top exceeds its row's best, a thread's does for its row's: what counts then is whether any
    thread has a score near enough. What is not below the threshold is wanted, NaN too.
    """
    units = range(4)
    of_block = [[unit] if BK == 64 else [unit // 2 * 2, unit // 2 * 2 + 1] for unit in units]
    tops = [[f"t{unit}_{i}" for unit in units] for i in range(2)]
    code = "{ .reg .pred p0, p1, some; .reg .b32 flags; .reg .f32 o, a0, a1, l0, l1; "
    code += "".join(f".reg .pred w{unit}; " for unit in units) + f".reg .f32 {', '.join(tops[0] + tops[1])}; "
    for i in range(2):
        code += "".join(f"mov.f32 {tops[i][unit]}, ${6 + 2 * unit + i}; " for unit in units)
        code += f"max.f32 a{i}, {tops[i][0]}, {tops[i][1]}; max.f32 o, {tops[i][2]}, {tops[i][3]}; "
        code += f"max.f32 a{i}, a{i}, o; setp.gt.f32 p{i}, a{i}, ${i}; add.f32 l{i}, ${i}, ${14 + i}; "
    code += "mov.b32 flags, 0; or.pred some, p0, p1; vote.sync.any.pred some, some, -1; @some bra.uni EXCEEDED; "
    for unit in units:
        every = [(tops[i][near], f"l{i}") for near in of_block[unit] for i in range(2)]
        code += f"setp.geu.f32 w{unit}, {every[0][0]}, {every[0][1]}; "
        code += "".join(f"setp.geu.or.f32 w{unit}, {top}, {least}, w{unit}; " for top, least in every[1:])
    code += "".join(f"@w{unit} or.b32 flags, flags, {1 << unit}; " for unit in units) + "bra.uni JUDGED; EXCEEDED: "
    for top in tops[0] + tops[1]:
        for other in (1, 2):
            code += f"shfl.sync.bfly.b32 o, {top}, {other}, 31, -1; max.f32 {top}, o, {top}; "
    for i in range(2):
        code += f"mov.f32 a{i}, ${i}; "
        for unit in units:
            code += "".join(f"max.f32 a{i}, a{i}, {tops[i][near]}; " for near in of_block[unit])
            code += f"add.f32 l{i}, a{i}, ${14 + i}; "
            for near in of_block[unit]:
                code += f"setp.geu.f32 some, {tops[i][near]}, l{i}; @some or.b32 flags, flags, {1 << unit}; "
        code += f"sub.f32 o, ${i}, a{i}; ex2.approx.ftz.f32 o, o; mul.f32 ${2 + i}, ${2 + i}, o; mov.f32 ${i}, a{i}; "
    return code + "JUDGED: redux.sync.or.b32 flags, flags, 0xffffffff; mov.b32 $4, flags; mov.b32 $5, flags; }"


@gluon.jit
def judged(best, tops, lam, board, BK: gl.constexpr):
    """The rows' best after four units, what sums shrink by, and the units that a warpgroup wants."""
    CODE: gl.constexpr = judge_code(BK)
    a, b, c, d = tops
    best, alpha, flags = gl.inline_asm_elementwise(
        CODE, "=f,=f,=f,=f,=r,=r,f,f,f,f,f,f,f,f,f,f,0,1,2,3",
        [a, b, c, d, lam, best, gl.full([ROWS, 4], 1.0, gl.float32, GROUPS)],
        dtype=(gl.float32, gl.float32, gl.int32), is_pure=True, pack=2,
    )  # fmt: skip
    return best, alpha, of_all_warps(flags, board)


@gluon.jit
def blocks_in(units, BK: gl.constexpr):
    """How many blocks are whole among a set of four units."""
    if BK == 128:
        units &= units >> 1 & 5
    return (units & 1) + (units >> 1 & 1) + (units >> 2 & 1) + (units >> 3)


@gluon.jit
def with_some_units(acc, total, a, b, a_factor, b_factor, offset, wanted, stage, FIRST: gl.constexpr, p, s):
    """(acc, total) with two units from FIRST on, of which some are wanted."""
    DOT: gl.constexpr = operand(p.DVP)
    if wanted != 0:
        a_p = shifted_powers(a, a_factor, offset + gl.where((wanted & 1) != 0, 0.0, float("-inf")))
        b_p = shifted_powers(b, b_factor, offset + gl.where((wanted & 2) != 0, 0.0, float("-inf")))
        a8, b8 = relabelled(a_p.to(gl.float8e4nv), DOT), relabelled(b_p.to(gl.float8e4nv), DOT)
        sums = gl.zeros([ROWS, 8], gl.float32, LANES)
        acc, sums = start_values(acc, sums, beside(a8, b8), stage, FIRST, False, p, s)
        if p.WRITE_LSE:
            sums = lane_sum(a_p) + lane_sum(b_p)
        acc, sums = wait_values(acc, sums, p)
        total += sums
    return acc, total


@gluon.jit
def exact_powers(raws, factors, best, p):
    """e4m3 probabilities of four units by exponentials, and the sums of what they were before."""
    DOT: gl.constexpr = operand(p.DVP)
    a, b, c, d = raws
    a_factor, b_factor, c_factor, d_factor = factors
    offset = P_SHIFT - best
    a_p, b_p = shifted_powers(a, a_factor, offset), shifted_powers(b, b_factor, offset)
    c_p, d_p = shifted_powers(c, c_factor, offset), shifted_powers(d, d_factor, offset)
    a8, b8 = relabelled(a_p.to(gl.float8e4nv), DOT), relabelled(b_p.to(gl.float8e4nv), DOT)
    c8, d8 = relabelled(c_p.to(gl.float8e4nv), DOT), relabelled(d_p.to(gl.float8e4nv), DOT)
    return (a8, b8, c8, d8), lane_sum(a_p) + lane_sum(b_p) + lane_sum(c_p) + lane_sum(d_p)


@gluon.jit
def of_rows(x, like):
    """A number per row, for all that a thread holds of an operand's rows."""
    x = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)
    x, _ = gl.broadcast(gl.expand_dims(x, 1), like)
    return x


@gluon.jit
def of_all(x, like):
    """One number for all."""
    return gl.full(like.shape, x, gl.float32, like.type.layout)


@gluon.jit
def all_ahead(like, p):
    return gl.full(like.shape, bits_ahead(p), gl.int32, like.type.layout)


@gluon.jit
def any_of(x):
    """Numbers that all columns of a row have, per row and thread."""
    x, _ = x.reshape([ROWS, 2, 2, 4, 2, 2]).permute([0, 3, 1, 2, 4, 5]).split()
    x, _ = x.split()
    x, _ = x.split()
    x, _ = x.split()
    return gl.convert_layout(x, GROUPS, assert_trivial=True)


@gluon.jit
def larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def most_of(q_scale, scales):
    """The largest that a row's sums of products are multiplied with, or NaN."""
    most = larger_or_nan(scales[0], scales[1])
    if len(scales) == 4:
        most = larger_or_nan(most, larger_or_nan(scales[2], scales[3]))
    return q_scale * most


@gluon.jit
def first_half(a_raw, b_raw, q_scale, scales, best, start, alpha, p):
    """What the second half needs of the first, and the rows' best, start and alpha after it: see `_powers`."""
    DOT: gl.constexpr = operand(p.DVP)
    a, b = relabelled(a_raw, DOT), relabelled(b_raw, DOT)
    a_logs, b_logs, peak, best, start, alpha = first_powers(
        a, b, of_rows(q_scale, a), of_all(scales[0], a), of_all(scales[1], a), of_rows(most_of(q_scale, scales), a),
        all_ahead(a, p), per_number(best, a, 4), per_number(start, a, 4), per_number(alpha, a, 4),
    )  # fmt: skip
    return (a_logs, b_logs, peak), any_of(best), any_of(start), any_of(alpha)


@gluon.jit
def second_half(c_raw, d_raw, of_first, q_scale, scales, best, start, alpha, p):
    """The probabilities of four units, and the rows' best, start and alpha."""
    DOT: gl.constexpr = operand(p.DVP)
    c, d = relabelled(c_raw, DOT), relabelled(d_raw, DOT)
    a_logs, b_logs, peak = of_first
    a8, b8, c8, d8, best, start, alpha = second_powers(
        c, d, a_logs, b_logs, peak, of_rows(q_scale, c), of_all(scales[2], c), of_all(scales[3], c),
        of_rows(most_of(q_scale, scales), c), all_ahead(c, p), per_number(best, c, 4), per_number(start, c, 4),
        per_number(alpha, c, 4),
    )  # fmt: skip
    return (a8, b8, c8, d8), any_of(best), any_of(start), any_of(alpha)


@gluon.jit
def of_known_best(raws, q_scale, scales, factors, best, p):
    """The probabilities of four units of which no score exceeds its row's best, and exact sums for an LSE."""
    if p.WRITE_LSE:
        return exact_powers(raws, factors, best, p)
    else:
        DOT: gl.constexpr = operand(p.DVP)
        a, b = relabelled(raws[0], DOT), relabelled(raws[1], DOT)
        c, d = relabelled(raws[2], DOT), relabelled(raws[3], DOT)
        powers8 = all_powers(
            a, b, c, d, of_rows(q_scale, a), of_all(scales[0], a), of_all(scales[1], a), of_all(scales[2], a),
            of_all(scales[3], a), of_rows(most_of(q_scale, scales), a), per_number(best, a, 4),
            per_number(start_of(best), a, 4),
        )  # fmt: skip
        return powers8, 0.0


@gluon.jit
def with_four_units(acc, total, powers8, exact_sums, stage, p, s):
    """(acc, total) with a wide step's probabilities, and what they weigh."""
    a8, b8, c8, d8 = powers8
    sums = gl.zeros([ROWS, 8], gl.float32, LANES)
    if p.ONES == 4 * UNIT:
        acc, sums = start_values(acc, sums, beside(beside(a8, b8), beside(c8, d8)), stage, 0, False, p, s)
    else:
        acc, sums = start_values(acc, sums, beside(a8, b8), stage, 0, False, p, s)
        acc, sums = start_values(acc, sums, beside(c8, d8), stage, 2, True, p, s)
    if p.WRITE_LSE:
        sums = exact_sums
    acc, sums = wait_values(acc, sums, p)
    return acc, total + sums


@gluon.jit
def fold_wide_step(acc, total, best, start, skipped, q, q_scale, lam, step, c, wg: gl.constexpr, p, s):
    """As fold_step, for 256 keys that every row sees: a step costs more than its keys, so the longer the better.

    `best` is per thread: asking others for it would hold up all that follows.
    """
    stage, parity = ring(c + step, p)
    mbarrier.wait(s.full.index(stage), parity)
    ab, cd = start_scores(q, stage, s, 0), start_scores(q, stage, s, 1)
    first = 4 * stage
    scales = (
        word_of(s.scales, first, 4), word_of(s.scales, first + 1, 4),
        word_of(s.scales, first + 2, 4), word_of(s.scales, first + 3, 4),
    )  # fmt: skip
    a_raw, b_raw = halves(warpgroup_mma_wait(1, deps=(ab,)))
    one = gl.full([ROWS, 4], 1.0, gl.float32, GROUPS)
    if p.SECOND or p.WRITE_LSE:
        factors = (q_scale * scales[0], q_scale * scales[1], q_scale * scales[2], q_scale * scales[3])
        a_top, b_top = unit_top(a_raw, factors[0]), unit_top(b_raw, factors[1])
        c_raw, d_raw = halves(warpgroup_mma_wait(0, deps=(cd,)))
        c_top, d_top = unit_top(c_raw, factors[2]), unit_top(d_raw, factors[3])
        raws = (a_raw, b_raw, c_raw, d_raw)
        if p.SECOND:
            best, alpha, wanted = judged(best, (a_top, b_top, c_top, d_top), lam, s.votes.index(wg), p.BK)
            wanted = wanted | word_of(s.needed, stage, 4)
            acc, total = shrunk(acc, total, alpha)
            if wanted == 15:
                powers8, sums = of_known_best(raws, q_scale, scales, factors, best, p)
                acc, total = with_four_units(acc, total, powers8, sums, stage, p, s)
            else:
                skipped += blocks_in(~wanted & 15, p.BK)
                offset = P_SHIFT - best
                acc, total = with_some_units(
                    acc, total, a_raw, b_raw, factors[0], factors[1], offset, wanted & 3, stage, 0, p, s
                )
                acc, total = with_some_units(
                    acc, total, c_raw, d_raw, factors[2], factors[3], offset, wanted >> 2, stage, 2, p, s
                )
        else:
            top = gl.maximum(gl.maximum(a_top, b_top), gl.maximum(c_top, d_top))
            best, alpha = follow(best, one, top, p.SLACK)
            powers8, sums = of_known_best(raws, q_scale, scales, factors, best, p)
            acc, total = shrunk(acc, total, alpha)
            acc, total = with_four_units(acc, total, powers8, sums, stage, p, s)
    else:
        of_first, best, start, alpha = first_half(a_raw, b_raw, q_scale, scales, best, start, one, p)
        c_raw, d_raw = halves(warpgroup_mma_wait(0, deps=(cd,)))
        powers8, best, start, alpha = second_half(c_raw, d_raw, of_first, q_scale, scales, best, start, alpha, p)
        acc, total = shrunk(acc, total, alpha)
        acc, total = with_four_units(acc, total, powers8, 0.0, stage, p, s)
    mbarrier.arrive(s.empty.index(stage), count=1)
    return acc, total, best, start, skipped


@gluon.jit
def with_one_unit(acc, total, best, start, a, q_scale, ka, most, alpha, stage, p, s):
    """(acc, total, best, start) with a unit's probabilities."""
    a8, best, start, alpha = one_power(a, q_scale, ka, most, all_ahead(a, p), best, start, alpha)
    acc, total = shrunk(acc, total, any_of(alpha))
    sums = gl.zeros([ROWS, 8], gl.float32, LANES)
    acc, sums = start_values(acc, sums, a8, stage, 0, False, p, s)
    acc, sums = wait_values(acc, sums, p)
    return acc, total + sums, any_of(best), any_of(start)


@gluon.jit
def with_two_units(acc, total, best, start, a, b, q_scale, ka, kb, most, alpha, stage, p, s):
    """(acc, total, best, start) with the probabilities of two units."""
    a8, b8, best, start, alpha = two_powers(a, b, q_scale, ka, kb, most, all_ahead(a, p), best, start, alpha)
    acc, total = shrunk(acc, total, any_of(alpha))
    sums = gl.zeros([ROWS, 8], gl.float32, LANES)
    acc, sums = start_values(acc, sums, beside(a8, b8), stage, 0, False, p, s)
    acc, sums = wait_values(acc, sums, p)
    return acc, total + sums, any_of(best), any_of(start)


@gluon.jit
def fold_short_step(acc, total, best, start, q, q_scale, step, c, t, p, s, TAIL: gl.constexpr):
    """As fold_wide_step, for two units of 64 keys, or the one that is left of a list."""
    DOT: gl.constexpr = operand(p.DVP)
    stage, parity = ring(c + step, p)
    mbarrier.wait(s.full.index(stage), parity)
    raw = start_scores(q, stage, s)
    first = p.UNITS * stage
    scales = (word_of(s.scales, first, 4), word_of(s.scales, first + 1, 4))
    a_raw, b_raw = halves(warpgroup_mma_wait(0, deps=(raw,)))
    a, b = relabelled(a_raw, DOT), relabelled(b_raw, DOT)
    q_scale, most = of_rows(q_scale, a), of_rows(most_of(q_scale, scales), a)
    ka, kb, alpha = of_all(scales[0], a), of_all(scales[1], a), of_all(1.0, a)
    best_before, start_before = per_number(best, a, 4), per_number(start, a, 4)
    b_real = step >= 0
    if TAIL:
        b_real = second_is_real(t, step, p.BK, True)
    if b_real:
        acc, total, best, start = with_two_units(
            acc, total, best_before, start_before, a, b, q_scale, ka, kb, most, alpha, stage, p, s
        )
    else:
        acc, total, best, start = with_one_unit(
            acc, total, best_before, start_before, a, q_scale, ka, most, alpha, stage, p, s
        )
    mbarrier.arrive(s.empty.index(stage), count=1)
    return acc, total, best, start


@gluon.jit
def fold_steps(acc, total, best, base, aside, skipped, q, rows, q_scale, lam, t, first, last, c, wg: gl.constexpr, p, s,
               MASK: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Fold the tile's steps from first to last; the program's count of steps is c before the tile.

    If `aside`, what came before is in `exact`, relative to 2^base.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    WIDE: gl.constexpr = p.UNITS == 4 and not MASK and not TAIL
    FITS: gl.constexpr = p.WGS == 2 or p.DVP <= 64  # else registers spill
    QUICK: gl.constexpr = FITS and not MASK and not p.SECOND and not p.WRITE_LSE
    PER_THREAD: gl.constexpr = WIDE or QUICK
    LEAP: gl.constexpr = PROMOTE // 2 if WIDE else PROMOTE
    if PER_THREAD:
        best, base = per_thread(best), per_thread(base)
        start = start_of(best)
        if p.SECOND:
            lam = per_thread(gl.where(rows < t.at.q_len, lam, float("inf")))
    begin = first
    while begin < last:
        end = gl.minimum(begin + LEAP, last)
        for step in range(begin, end):
            if WIDE:
                acc, total, best, start, skipped = fold_wide_step(
                    acc, total, best, start, skipped, q, q_scale, lam, step, c, wg, p, s
                )
            elif QUICK:
                acc, total, best, start = fold_short_step(acc, total, best, start, q, q_scale, step, c, t, p, s, TAIL)
            else:
                acc, total, best, skipped = fold_step(
                    acc, total, best, skipped, q, rows, q_scale, lam, step, c, t, wg, p, s, MASK, TAIL
                )
        if not TAIL:  # which has few steps
            if end < last:
                if aside != 0:
                    acc = promoted(acc, gl.exp2(base - best), wg, p, s)
                put_aside(acc, wg, p, s)
                acc = gl.zeros([ROWS, p.DVP], gl.float32, VALUES)
                base = best
                aside = aside * 0 + 1
        begin = end
    if PER_THREAD:
        best, base = per_row(best), per_row(base)
    return acc, total, best, base, aside, skipped


@gluon.jit
def row_sums(total, p):
    """The rows' totals, of what their threads have."""
    row_total = gl.sum(total, 1) if p.WRITE_LSE else gl.max(total, 1)
    return gl.convert_layout(row_total, ROW, assert_trivial=True)


@gluon.jit
def pieces_joined(acc, row_total, best, tile, piece, wg: gl.constexpr, p):
    """A piece's sums, left for whoever is last of its tile's; the tile's own, and 1, for that one.

    In the order of the list, whoever is last: results do not depend on it.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    LENGTH: gl.constexpr = ROWS * p.DVP + 2 * ROWS  # of sums, totals, bests
    in_rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, VALUES)), 1)
    inside = in_rows * p.DVP + gl.expand_dims(gl.arange(0, p.DVP, gl.SliceLayout(0, VALUES)), 0)
    rows = ROWS * p.DVP + gl.arange(0, ROWS, ROW)
    first = p.EXACT + ((tile - p.whole) * p.pieces * p.WGS + wg).to(gl.int64) * LENGTH
    own = first + piece * (p.WGS * LENGTH)
    gl.store(own + inside, acc)
    gl.store(own + rows, row_total)
    gl.store(own + rows + ROWS, best)
    wait_for_all()  # all of the warpgroup's are written before it is counted
    before = gl.atomic_add(p.TICKETS + 1 + (tile - p.whole) * p.WGS + wg, 1)
    last = (before == p.pieces - 1).to(gl.int32)
    if last != 0:
        acc, row_total, best = gl.load(first + inside), gl.load(first + rows), gl.load(first + rows + ROWS)
        for _ in range(1, p.pieces):
            first += p.WGS * LENGTH
            top = gl.load(first + rows + ROWS)
            best_now = gl.maximum(best, top)
            alpha, beta = gl.exp2(best - best_now), gl.exp2(top - best_now)
            row_total = row_total * alpha + gl.load(first + rows) * beta
            alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
            beta = gl.expand_dims(gl.convert_layout(beta, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
            acc = acc * alpha + gl.load(first + inside) * beta
            best = best_now
    return acc, row_total, best, last


@gluon.jit
def store_rows(acc, row_total, best, t, wg: gl.constexpr, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head,
               o_row, DV: gl.constexpr):  # fmt: skip
    """Divide, and write: through shared memory, so that a row's channels leave sixteen bytes at a time."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    STAGED: gl.constexpr = p.DVP <= 128  # else there is no room
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // p.DVP, p.DVP // 8], [4, 1], [1, 0]) if STAGED else VALUES
    ALIGNED: gl.constexpr = 8 if DV % 8 == 0 else 1  # channels that every stride is a multiple of
    dv = gl.arange(0, p.DVP, gl.SliceLayout(0, FLAT))
    v_scale = gl.load(V_SCALE + t.at.kv * DV + dv, mask=dv < DV, other=0.0)
    # A row that saw nothing is marked by a number no mean of e4m3 values is; NaN stays NaN. Flags of their own would go
    # through shared memory as well, and cost the loop above registers.
    divisor = gl.expand_dims(gl.convert_layout(row_total, gl.SliceLayout(1, VALUES), assert_trivial=True), 1)
    out = gl.where(divisor == 0, NO_MEAN, acc * (1.0 / divisor))
    first_row = t.first_row + wg * ROWS
    wide = t.at.bh.to(gl.int64)
    at = gl.expand_dims(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, FLAT)), 1)
    target = OUT + (wide // p.heads) * (o_batch // ALIGNED * ALIGNED) + (wide % p.heads) * (o_head // ALIGNED * ALIGNED)
    target = target + (t.at.q_first + at).to(gl.int64) * (o_row // ALIGNED * ALIGNED) + gl.expand_dims(dv, 0)
    if STAGED:
        s.exact.index(wg).store(out)
        v_mean = gl.load(V_MEAN + t.at.kv * DV + dv, mask=dv < DV, other=0.0)
        out = s.exact.index(wg).load(FLAT)
    saw = out != NO_MEAN
    out *= gl.expand_dims(v_scale, 0)
    if not STAGED:  # a thread has many channels, and no registers for scales and means at once
        v_mean = gl.load(V_MEAN + t.at.kv * DV + dv, mask=dv < DV, other=0.0)
    out = gl.where(saw, out + gl.expand_dims(v_mean, 0), 0.0)  # what smoothing took from each value
    gl.store(target, out.to(OUT.dtype.element_ty), mask=(at < t.at.q_len) & gl.expand_dims(dv < DV, 0))
    if p.WRITE_LSE:
        rows = first_row + gl.arange(0, ROWS, ROW)
        place = t.at.query.to(gl.int64) + rows
        lse = (best + gl.log2(row_total) - P_SHIFT) / 1.4426950408889634
        lse += gl.load(LSE_TERM + place, mask=rows < t.at.q_len, other=0.0)  # what smoothing took from every score
        gl.store(LSE + place, gl.where(row_total == 0, float("-inf"), lse), mask=rows < t.at.q_len)


@gluon.jit
def note_skips(skipped, t, wg: gl.constexpr, p):
    """Add the blocks that a warpgroup's rows skipped, if there are any, to those of the rows they are counted with."""
    inside = t.first_row % p.BQ + wg * ROWS
    skipped = gl.where(t.first_row + wg * ROWS < t.at.q_len, skipped, 0)
    gl.atomic_add(p.SKIPPED + t.slot * (p.BQ // p.SKIP_ROWS) + inside // p.SKIP_ROWS, skipped)


@gluon.jit
def queries_again(turn, wg: gl.constexpr, p, s):
    """A warpgroup's queries, for another loop.

    ptxas would take their address from the loop before even where that loop is passed over: the likeness is hidden.
    """
    return s.q.index(word_of(s.slots, turn & 1, 4) * p.WGS + wg)


@gluon.jit
def consumer(wg: gl.constexpr, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    """One warpgroup: its 64 rows of every tile the program draws."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DVP, 32])
    c = 0
    turn = 0
    tile, t, q_scale = next_tile(turn, wg, True, p, s)
    while tile >= 0:
        rows = t.first_row + wg * ROWS + gl.arange(0, ROWS, ROW)
        q_scale *= p.scale
        acc = gl.zeros([ROWS, p.DVP], gl.float32, VALUES)
        total = gl.zeros([ROWS, 8], gl.float32, LANES)
        best = gl.full([ROWS], NOTHING, gl.float32, ROW)
        skipped = tile * 0
        aside = tile * 0
        lam = p.scale
        if p.SECOND:
            lam = gl.load(p.LAMBDA + t.at.bh % p.heads) * 1.4426950408889634
        mbarrier.wait(s.q_full.index(turn & 1), (turn >> 1) & 1)
        q = s.q.index((turn & 1) * p.WGS + wg)
        acc, total, best, base, aside, skipped = fold_steps(
            acc, total, best, best, aside, skipped, q, rows, q_scale, lam, t, 0, t.masked_steps, c, wg, p, s,
            True, False,
        )  # fmt: skip
        if p.TAIL:
            q = queries_again(turn, wg, p, s)
            acc, total, best, base, aside, skipped = fold_steps(
                acc, total, best, base, aside, skipped, q, rows, q_scale, lam, t, t.masked_steps, t.narrow_steps, c, wg,
                p, s, False, True,
            )  # fmt: skip
        q = queries_again(turn, wg, p, s)
        acc, total, best, base, aside, skipped = fold_steps(
            acc, total, best, base, aside, skipped, q, rows, q_scale, lam, t, t.narrow_steps, t.steps, c, wg, p, s,
            False, False,
        )  # fmt: skip
        if aside != 0:
            acc = promoted(acc, gl.exp2(base - best), wg, p, s)
        if p.SECOND:
            note_skips(skipped, t, wg, p)
        c += t.steps
        last = tile * 0 + 1
        piece = last
        if p.DIVIDED:
            piece = word_of(s.ticket, 6 + (turn & 1), 4)  # only now: the loops have no register for it
        mbarrier.arrive(s.q_empty.index(turn & 1), count=1)
        row_total = row_sums(total, p)
        if p.DIVIDED:
            if piece >= 0:
                acc, row_total, best, last = pieces_joined(acc, row_total, best, tile, piece, wg, p)
        turn += 1
        tile, after, q_scale = next_tile(turn, wg, True, p, s)  # meanwhile these rows are written
        if last != 0:
            store_rows(
                acc, row_total, best, t, wg, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV
            )
        t = after


@gluon.jit
def first_consumer(p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(0, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


@gluon.jit
def second_consumer(p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(1, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


@gluon.jit
def third_consumer(p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV: gl.constexpr):
    consumer(2, p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)


LENGTHS = ["heads", "group", "q_len", "k_len", "q_tokens", "k_tokens", "q_blocks", "first_block", "k_blocks", "k_slots",
           "padded", "tiles", "whole", "pieces", "left", "right", "scale", "o_batch", "o_head", "o_row"]  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def attend(
    q_boxes, k_boxes, v_boxes,  # int8 [B Hq Nq, D] and [B Hkv padded, D]; e4m3 [B Hkv DVP, padded]
    COUNTS, CUTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, Q_ENDS, K_ENDS, V_FINITE, LAMBDA, V_SCALE, V_MEAN, LSE_TERM,
    SKIPPED, EXACT, OUT, LSE,  # SKIPPED and TICKETS hold zeros
    heads, group, q_len, k_len, q_tokens, k_tokens, q_blocks, first_block, k_blocks, k_slots, padded, tiles,
    whole, pieces, left, right, scale, o_batch, o_head, o_row,
    D: gl.constexpr, DVP: gl.constexpr, DV: gl.constexpr, WGS: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, CUTS_FIRST: gl.constexpr, HAS_VALID: gl.constexpr, WRITE_LSE: gl.constexpr,
    PACKED: gl.constexpr, SECOND: gl.constexpr, SLACK: gl.constexpr, UNITS: gl.constexpr, DIVIDED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    p = Problem(
        heads, group, q_len, k_len, q_tokens, k_tokens, q_blocks, first_block, k_blocks, k_slots, padded, tiles,
        whole, pieces, left, right, scale, COUNTS, CUTS, LISTS, TICKETS, Q_SCALE, K_SCALE, VALID, Q_ENDS, K_ENDS,
        V_FINITE, LAMBDA, SKIPPED, EXACT, D, DVP, WGS, BQ, BK, STAGES, CUTS_FIRST, HAS_VALID, WRITE_LSE, PACKED, SECOND,
        64 * WGS, SLACK, UNITS, (UNITS == 4 or not SECOND) and UNITS * UNIT > BK, DIVIDED,
    )  # fmt: skip
    ones = gl.allocate_shared_memory(gl.float8e4nv, [8, p.ONES], gl.NVMMASharedLayout(64, 8, 2))
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    # as bits: ptxas 12.8 packs a converted constant wrongly
    ones.store(gl.full([8, p.ONES], 0x38, gl.int8, flat).to(gl.float8e4nv, bitcast=True))
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], WORDS)
    for i in gl.static_range(2):
        set_word(slots, i, i, 4)
    SUMS: gl.constexpr = [WGS, ROWS, DVP] if DVP <= 128 else [1, 1, 4]
    exact = gl.allocate_shared_memory(gl.float32, SUMS, gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    s = Shared(
        gl.allocate_shared_memory(gl.int8, [2 * WGS, ROWS, D], q_boxes.layout),
        gl.allocate_shared_memory(gl.int8, [STAGES, UNITS * UNIT, D], k_boxes.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, DVP, UNITS * UNIT], v_boxes.layout),
        ones, exact, gl.allocate_shared_memory(gl.int8, [WGS, 4 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [8, 1], WORDS), slots,
        gl.allocate_shared_memory(gl.float32, [UNITS * STAGES, 1], WORDS),
        gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], WORDS),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], WORDS),
        barriers(2, 1), barriers(2, WGS), barriers(STAGES, 1), barriers(STAGES, WGS), barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    if WGS == 2:
        gl.warp_specialize([
            (first_consumer, (p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (second_consumer, (p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (producer, (q_boxes, k_boxes, v_boxes, p, s)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (first_consumer, (p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (second_consumer, (p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (third_consumer, (p, s, V_SCALE, V_MEAN, LSE_TERM, OUT, LSE, o_batch, o_head, o_row, DV)),
            (producer, (q_boxes, k_boxes, v_boxes, p, s)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
