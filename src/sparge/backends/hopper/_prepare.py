"""Preparation for sm_90 in Gluon: what `triton._prepare` computes of queries, keys and values, at the speed of memory.

A tile is 64 tokens of one head. Programs of one warpgroup each walk through tiles that lie next to each other, fetch
the next one by TMA, and let the tensor core read this one from shared memory: nothing waits for registers to be filled
from there. Queries and keys are multiplied with the rotation, and, turned on their side, with ones and zeros that add
up sub-blocks. Values are multiplied with a permutation: that turns them on their side, and puts tokens in the order in
which every thread holds sixteen bytes that belong next to each other.

The means that smooth keys and values, and the scales of values, come from the sample that `triton._prepare` takes.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from sparge import quantization as fmt
from sparge.backends.hopper._attend import barriers, load_box, ring, wait_for_all

TILE = gl.constexpr(64)  # tokens
SEGMENTS = gl.constexpr(8)  # most sub-blocks of a tile, and the fewest columns of a product
ROUND = gl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits
FP8_MAX = gl.constexpr(fmt.FP8_MAX)
QUERIES, KEYS, VALUES = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # as triton._prepare numbers its kinds


@aggregate
class Problem:
    """What the launch says."""

    heads: gl.tensor  # of what the launch reads
    tiles: gl.tensor  # of one head
    q_len: gl.tensor
    k_len: gl.tensor
    padded: gl.tensor
    q_slots: gl.tensor
    k_slots: gl.tensor
    rotation_scale: gl.tensor
    MEAN: gl.tensor
    ROTATED_MEAN: gl.tensor
    V_SCALE: gl.tensor
    V_MEAN: gl.tensor
    V_FINITE: gl.tensor
    V_REPAIR: gl.tensor
    Q_MEANS: gl.tensor
    K_MEANS: gl.tensor
    Q8: gl.tensor
    K8: gl.tensor
    V8: gl.tensor
    Q_SCALE: gl.tensor
    K_SCALE: gl.tensor
    D: gl.constexpr
    DV: gl.constexpr
    DP: gl.constexpr
    BQ: gl.constexpr
    BK: gl.constexpr
    Q_SUBS: gl.constexpr
    K_SUBS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, heads, tiles, q_len, k_len, padded, q_slots, k_slots, rotation_scale, MEAN, ROTATED_MEAN,
        V_SCALE, V_MEAN, V_FINITE, V_REPAIR, Q_MEANS, K_MEANS, Q8, K8, V8, Q_SCALE, K_SCALE, D, DV, DP, BQ, BK, Q_SUBS,
        K_SUBS, STAGES,
    ):  # fmt: skip
        self.heads, self.tiles, self.q_len, self.k_len = heads, tiles, q_len, k_len
        self.padded, self.q_slots, self.k_slots, self.rotation_scale = padded, q_slots, k_slots, rotation_scale
        self.MEAN, self.ROTATED_MEAN, self.V_SCALE, self.V_MEAN = MEAN, ROTATED_MEAN, V_SCALE, V_MEAN
        self.V_FINITE, self.V_REPAIR, self.Q_MEANS, self.K_MEANS = V_FINITE, V_REPAIR, Q_MEANS, K_MEANS
        self.Q8, self.K8, self.V8, self.Q_SCALE, self.K_SCALE = Q8, K8, V8, Q_SCALE, K_SCALE
        self.D, self.DV, self.DP, self.BQ, self.BK = map(gl.constexpr, (D, DV, DP, BQ, BK))
        self.Q_SUBS, self.K_SUBS, self.STAGES = map(gl.constexpr, (Q_SUBS, K_SUBS, STAGES))


@aggregate
class Shared:
    tiles: gl.shared_memory_descriptor  # [STAGES, 1, 1, 64, DP]
    rotation: gl.shared_memory_descriptor  # of queries and keys, [DP, DP]: +-1; of values, [64, 64]: where tokens go
    picks: gl.shared_memory_descriptor  # [8, 64]: which tokens belong to a sub-block
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, rotation, picks, full):
        self.tiles, self.rotation, self.picks, self.full = tiles, rotation, picks, full


@gluon.jit
def following(batch, head, tile, p):
    """The tile after one."""
    tile += 1
    next_head = tile == p.tiles
    tile = gl.where(next_head, 0, tile)
    head += next_head.to(gl.int32)
    next_batch = head == p.heads
    head = gl.where(next_batch, 0, head)
    return batch + next_batch.to(gl.int32), head, tile


@gluon.jit
def fetch(boxes, batch, head, tile, c, p, s):
    """A program's c-th tile, into a stage that all have left."""
    stage, _ = ring(c, p)
    mbarrier.expect(s.full.index(stage), TILE * p.DP * 2)
    load_box(boxes, [batch, head, tile * TILE, 0], s.full.index(stage), s.tiles.index(stage))


@gluon.jit
def fetched(c, p, s):
    """A program's c-th tile, when it is there."""
    stage, parity = ring(c, p)
    mbarrier.wait(s.full.index(stage), parity)
    return s.tiles.index(stage).reshape([TILE, p.DP])


@gluon.jit
def larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def inverse_or_zero(scale):
    good = scale > 0
    return gl.where(good, 1.0 / gl.where(good, scale, 1.0), 0.0)


@gluon.constexpr_function
def side_by_side(rows, columns):
    """The layout of a product whose columns were permuted, in each 64, so that a thread's sixteen numbers of a row lie
    next to each other; as it is but for the order of registers."""
    near = [[0, 1], [0, 2], [0, 4], [0, 8]] + [[0, 64]] * (columns == 128) + [[8, 0]] + [[64, 0]] * (rows == 128)
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(near, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store_int8(target, x, inverse, first, stop, p):
    """Rows of integers in [-127, 127], channels in the order a thread holds them: see triton._prepare.round_to_int8."""
    GIVEN: gl.constexpr = x.type.layout
    zeros = gl.zeros([TILE, p.DP], gl.float32, GIVEN)
    bits = gl.fma(x, gl.expand_dims(inverse, 1) + zeros, zeros + ROUND).to(gl.int32, bitcast=True)
    LAYOUT: gl.constexpr = side_by_side(TILE, p.DP)
    x8 = bits.to(gl.int8).reshape([TILE, p.DP // 64, 8, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([TILE, p.DP])
    x8 = gl.convert_layout(x8, LAYOUT, assert_trivial=True)
    row = first + gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT)), 1)
    channel = gl.expand_dims(gl.arange(0, p.DP, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(target + (row.to(gl.int64) * p.DP + channel), x8, mask=row < stop)


@gluon.jit
def products(tile, p, s):
    """A tile rotated, [64, DP], and the sums of its sub-blocks, [DP, 8]."""
    ROTATED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEGMENTS, 16])
    sums = gl.zeros([p.DP, SEGMENTS], gl.float32, SUMS)
    sums = warpgroup_mma(tile.permute((1, 0)), s.picks.permute((1, 0)), sums, use_acc=False, is_async=True)
    rotated = gl.zeros([TILE, p.DP], gl.float32, ROTATED)
    rotated = warpgroup_mma(tile, s.rotation, rotated, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(rotated, sums))


@gluon.jit
def prepare_queries(row, first, tile, p, s):
    SUB_ROWS: gl.constexpr = p.BQ // p.Q_SUBS
    rotated, sums = products(tile, p, s)
    segment = gl.arange(0, SEGMENTS, gl.SliceLayout(0, sums.type.layout))
    channel = gl.expand_dims(gl.arange(0, p.DP, gl.SliceLayout(1, sums.type.layout)), 1)
    left = p.q_len - first - segment * SUB_ROWS
    share = 1.0 / gl.minimum(gl.maximum(left, 1), SUB_ROWS).to(gl.float32)
    means = sums * gl.expand_dims(share, 0)
    slot = first // SUB_ROWS + segment
    there = (segment < TILE // SUB_ROWS) & (slot < p.q_slots * p.Q_SUBS)
    place = p.Q_MEANS + gl.expand_dims((row * p.q_slots * p.Q_SUBS + slot) * p.D, 0) + channel
    gl.store(place, means.to(gl.bfloat16), mask=gl.expand_dims(there, 0) & (channel < p.D))

    scale = gl.reduce(gl.abs(rotated), 1, larger_or_nan)
    scale = gl.where(scale < float("inf"), scale / 127.0, float("nan"))
    store_int8(p.Q8 + row * p.q_len * p.DP, rotated, inverse_or_zero(scale), first, p.q_len, p)
    token = first + gl.arange(0, TILE, gl.SliceLayout(1, rotated.type.layout))
    gl.store(p.Q_SCALE + row * p.q_len + token, scale * p.rotation_scale, mask=token < p.q_len)


@gluon.jit
def prepare_keys(row, first, tile, p, s):
    SUB_ROWS: gl.constexpr = p.BK // p.K_SUBS
    ROTATED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEGMENTS, 16])
    across = gl.arange(0, p.DP, gl.SliceLayout(0, ROTATED))
    rotated_mean = gl.expand_dims(gl.load(p.ROTATED_MEAN + row * p.DP + across), 0)
    channel = gl.arange(0, p.DP, gl.SliceLayout(1, SUMS))
    mean = gl.expand_dims(gl.load(p.MEAN + row * p.D + channel, mask=channel < p.D, other=0.0), 1)
    channel = gl.expand_dims(channel, 1)
    rotated, sums = products(tile, p, s)
    segment = gl.arange(0, SEGMENTS, gl.SliceLayout(0, SUMS))
    count = gl.minimum(gl.maximum(p.k_len - first - segment * SUB_ROWS, 0), SUB_ROWS)
    share = 1.0 / gl.maximum(count, 1).to(gl.float32)  # exact for whole sub-blocks
    means = sums * gl.expand_dims(share, 0) - mean
    means = gl.where(gl.abs(means) < float("inf"), means, float("nan"))
    means = gl.where(gl.expand_dims(count > 0, 0), means, 0.0)
    number = first // SUB_ROWS + segment
    block = number // p.K_SUBS
    slot = (row * p.K_SUBS + number % p.K_SUBS) * p.k_slots + block
    there = (segment < TILE // SUB_ROWS) & (block < p.k_slots)
    place = p.K_MEANS + gl.expand_dims(slot * p.D, 0) + channel
    gl.store(place, means.to(gl.bfloat16), mask=gl.expand_dims(there, 0) & (channel < p.D))

    # Rows that hold no key were read as zeros, and stay zeros.
    token = first + gl.arange(0, TILE, gl.SliceLayout(1, ROTATED))
    smooth = gl.where(gl.expand_dims(token < p.k_len, 1), rotated - rotated_mean, 0.0)
    most = gl.reduce(gl.reduce(gl.abs(smooth), 1, larger_or_nan), 0, larger_or_nan)
    scale = gl.where(most < float("inf"), most / 127.0, float("nan"))
    inverse = inverse_or_zero(scale) + gl.zeros([TILE], gl.float32, gl.SliceLayout(1, ROTATED))
    store_int8(p.K8 + row * p.padded * p.DP, smooth, inverse, first, p.padded, p)
    gl.store(p.K_SCALE + row * (p.padded // TILE) + first // TILE, scale * p.rotation_scale)


@gluon.jit
def prepare_values(row, first, tile, p, s):
    """Values that are not finite break all of their tile's tokens in a channel here; such heads are repaired."""
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    LAYOUT: gl.constexpr = side_by_side(p.DP, TILE)
    channel = gl.arange(0, p.DP, gl.SliceLayout(1, TURNED))
    inverse = 1.0 / gl.load(p.V_SCALE + row * p.DV + channel, mask=channel < p.DV, other=1.0)
    mean = gl.load(p.V_MEAN + row * p.DV + channel, mask=channel < p.DV, other=0.0) * inverse
    zeros = gl.zeros([p.DP, TILE], gl.float32, TURNED)
    turned = warpgroup_mma(tile.permute((1, 0)), s.rotation, zeros, use_acc=False, is_async=True)
    turned = warpgroup_mma_wait(0, deps=(turned,))
    v = gl.fma(turned, gl.expand_dims(inverse, 1) + zeros, zeros - gl.expand_dims(mean, 1))
    worst = gl.reduce(gl.abs(v), 1, larger_or_nan)
    inside = (first < p.k_len) & (channel >= 0)
    finite = p.V_FINITE + row * p.k_slots + first // p.BK
    gl.store(finite + channel * 0, (channel * 0).to(gl.int8), mask=inside & ~(worst < float("inf")))
    gl.store(p.V_REPAIR + row + channel * 0, channel * 0 + 1, mask=inside & ~(worst <= FP8_MAX))
    v8 = v.to(gl.float8e4nv).reshape([p.DP, TILE // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([p.DP, TILE])
    v8 = gl.convert_layout(v8, LAYOUT, assert_trivial=True)
    line = gl.expand_dims(gl.arange(0, p.DP, gl.SliceLayout(1, LAYOUT)), 1).to(gl.int64)
    column = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT)), 0)
    padded = p.padded // 128 * 128  # which it is: said for the compiler, who else stores bytes
    gl.store(p.V8 + (row * p.DP + line) * padded + (first + column), v8)


@gluon.jit
def write_factors(HADAMARD, s, DTYPE: gl.constexpr, DP: gl.constexpr, SUB_ROWS: gl.constexpr, KIND: gl.constexpr):
    """What tiles are multiplied with, into shared memory."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, FLAT)), 0)
    if KIND == VALUES:
        # A thread holds columns 2 t, 2 t + 1 of each eight, t being its place in a group of four: bytes 16 t to
        # 16 t + 15, which are tokens in the order of triton._prepare.permuted_tokens.
        t = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(1, FLAT)), 1)
        place = token % 8 // 2 * 16 + token // 8 * 2 + token % 2
        source = (place & ~15) + (place & 1) + 2 * ((place >> 2) & 3) + 8 * ((place >> 1) & 1)
        s.rotation.store((t == source).to(DTYPE))
    else:
        r = gl.expand_dims(gl.arange(0, DP, gl.SliceLayout(1, FLAT)), 1)
        d = gl.expand_dims(gl.arange(0, DP, gl.SliceLayout(0, FLAT)), 0)
        s.rotation.store(gl.load(HADAMARD + r * DP + d).to(DTYPE))
        segment = gl.expand_dims(gl.arange(0, SEGMENTS, gl.SliceLayout(1, FLAT)), 1)
        s.picks.store((token // SUB_ROWS == segment).to(DTYPE))


LENGTHS = ["heads", "tiles", "q_len", "k_len", "padded", "q_slots", "k_slots", "all_tiles", "rotation_scale",
           "kv_rows"]  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def prepare(
    boxes,  # [B, H, N, D] in 16 bits
    HADAMARD, ARRIVED, V_REPAIR,  # counters: queries set them to zero
    MEAN, ROTATED_MEAN, V_SCALE, V_MEAN, V_FINITE,  # per key/value head, as the sample left them
    Q_MEANS, K_MEANS, Q8, K8, V8, Q_SCALE, K_SCALE,  # outputs
    heads, tiles, q_len, k_len, padded, q_slots, k_slots, all_tiles, rotation_scale, kv_rows,
    D: gl.constexpr, DV: gl.constexpr, DP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr,
    Q_SUBS: gl.constexpr, K_SUBS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One program: as many of all tiles as the others have, next to each other."""
    p = Problem(
        heads, tiles, q_len, k_len, padded, q_slots, k_slots, rotation_scale, MEAN, ROTATED_MEAN,
        V_SCALE, V_MEAN, V_FINITE, V_REPAIR, Q_MEANS, K_MEANS, Q8, K8, V8, Q_SCALE, K_SCALE, D, DV, DP, BQ, BK, Q_SUBS,
        K_SUBS, STAGES,
    )  # fmt: skip
    if KIND == QUERIES:
        for n in range(gl.program_id(0), kv_rows, gl.num_programs(0)):
            gl.store(ARRIVED + n, 0)
            gl.store(V_REPAIR + n, 0)
    DTYPE: gl.constexpr = boxes.dtype
    SIDE: gl.constexpr = TILE if KIND == VALUES else DP
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # rows of 64 numbers of 16 bits or more
    s = Shared(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, TILE, DP], boxes.layout),
        gl.allocate_shared_memory(DTYPE, [SIDE, SIDE], WIDE),
        gl.allocate_shared_memory(DTYPE, [SEGMENTS, TILE], WIDE),
        barriers(STAGES, 1),
    )  # fmt: skip
    write_factors(HADAMARD, s, DTYPE, DP, BQ // Q_SUBS if KIND == QUERIES else BK // K_SUBS, KIND)
    fence_async_shared()
    wait_for_all()
    begin = (all_tiles.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (all_tiles.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    tile = begin % tiles
    head = begin // tiles % heads
    batch = begin // tiles // heads
    ahead, next_tile, next_head, next_batch = begin, tile, head, batch  # the next to fetch
    for c in range(STAGES - 1):
        if ahead < end:
            fetch(boxes, next_batch, next_head, next_tile, c, p, s)
        next_batch, next_head, next_tile = following(next_batch, next_head, next_tile, p)
        ahead += 1
    for n in range(begin, end):
        c = n - begin
        wait_for_all()  # all have read the tile before
        if ahead < end:
            fetch(boxes, next_batch, next_head, next_tile, c + STAGES - 1, p, s)
        next_batch, next_head, next_tile = following(next_batch, next_head, next_tile, p)
        ahead += 1
        tokens = fetched(c, p, s)
        row = (batch * heads + head).to(gl.int64)
        if KIND == QUERIES:
            prepare_queries(row, tile * TILE, tokens, p, s)
        elif KIND == KEYS:
            prepare_keys(row, tile * TILE, tokens, p, s)
        else:
            prepare_values(row, tile * TILE, tokens, p, s)
        batch, head, tile = following(batch, head, tile, p)
