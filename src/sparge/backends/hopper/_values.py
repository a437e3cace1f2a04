"""Preparation of values by two warps, beside another kernel's work: what `_prepare.prepare_values` computes.

Two warps fit where others leave registers for no more, and have no tensor core, which takes four. A tile of 64 tokens
is read from shared memory by parts, so that a thread holds sixteen tokens of two channels, and two threads next to each
other what one sector of memory takes of a channel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from sparge.backends.hopper._attend import barriers, wait_for_all
from sparge.backends.hopper._prepare import FP8_MAX, TILE, fetch, fetched, following, larger_or_nan

WARPS = gl.constexpr(2)
TOKENS, CHANNELS = gl.constexpr(32), gl.constexpr(64)  # of a part, as much as two warps hold; tokens of a sector


@aggregate
class Values:
    """What the launch says of values, and two warps' shared memory."""

    batch: gl.tensor
    heads: gl.tensor
    tiles: gl.tensor  # of one head
    k_len: gl.tensor
    padded: gl.tensor
    k_slots: gl.tensor
    V_SCALE: gl.tensor
    V_MEAN: gl.tensor
    V_FINITE: gl.tensor
    V_REPAIR: gl.tensor
    V8: gl.tensor
    DV: gl.constexpr
    DP: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, batch, heads, tiles, k_len, padded, k_slots, V_SCALE, V_MEAN, V_FINITE, V_REPAIR, V8, DV, DP, BK, STAGES
    ):
        self.batch, self.heads, self.tiles, self.k_len = batch, heads, tiles, k_len
        self.padded, self.k_slots = padded, k_slots
        self.V_SCALE, self.V_MEAN, self.V_FINITE = V_SCALE, V_MEAN, V_FINITE
        self.V_REPAIR, self.V8 = V_REPAIR, V8
        self.DV, self.DP, self.BK, self.STAGES = map(gl.constexpr, (DV, DP, BK, STAGES))


@aggregate
class ValuesShared:
    tiles: gl.shared_memory_descriptor  # [STAGES, 1, 1, 64, DP]
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full):
        self.tiles, self.full = tiles, full


@gluon.jit
def values_shared(boxes, DP: gl.constexpr, STAGES: gl.constexpr):
    tiles = gl.allocate_shared_memory(boxes.dtype, [STAGES, 1, 1, TILE, DP], boxes.layout)
    return ValuesShared(tiles, barriers(STAGES, 1))


@gluon.constexpr_function
def tokens_by_channels():
    """What a thread holds of a part: sixteen tokens of two channels."""
    lanes = [[16, 0], [0, 2], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], lanes, [[0, 32]], [], [TOKENS.value, CHANNELS.value]
    )


@gluon.constexpr_function
def channels_by_tokens():
    """The same, turned on its side; registers in the order in which a thread's sixteen tokens are stored."""
    lanes = [[0, 16], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]], lanes, [[32, 0]], [], [CHANNELS.value, TOKENS.value]
    )


@gluon.jit
def prepare_part(row, first, begin, part, inverse, mean, p):
    """Some tokens and channels of a tile, from `first` and `begin` on. Values that are not finite break their blocks;
    such heads are repaired."""
    LAYOUT: gl.constexpr = tokens_by_channels()
    zeros = gl.zeros([TOKENS, CHANNELS], gl.float32, LAYOUT)
    v = part.load(LAYOUT).to(gl.float32)
    v = gl.fma(v, gl.expand_dims(inverse, 0) + zeros, zeros - gl.expand_dims(mean, 0))
    worst = gl.reduce(gl.abs(v).reshape([TOKENS // 16, 16, CHANNELS // 2, 2]), 1, larger_or_nan)
    worst = gl.reduce(worst, 2, larger_or_nan)  # of what a thread holds
    nowhere = gl.full([TOKENS // 16, CHANNELS // 2], 0, gl.int32, worst.type.layout)
    inside = first + nowhere < p.k_len
    finite = p.V_FINITE + row * p.k_slots + first // p.BK
    gl.store(finite + nowhere, nowhere.to(gl.int8), mask=inside & ~(worst < float("inf")))
    gl.store(p.V_REPAIR + row + nowhere, nowhere + 1, mask=inside & ~(worst <= FP8_MAX))
    # in the order of triton._prepare.permuted_tokens
    v = v.reshape([TOKENS // 16, 2, 4, 2, CHANNELS]).permute([0, 2, 1, 3, 4]).reshape([TOKENS, CHANNELS])
    STORED: gl.constexpr = channels_by_tokens()
    v8 = gl.convert_layout(v.permute([1, 0]), STORED, assert_trivial=True).to(gl.float8e4nv)
    line = begin + gl.expand_dims(gl.arange(0, CHANNELS, gl.SliceLayout(1, STORED)), 1).to(gl.int64)
    column = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, STORED)), 0)
    padded = p.padded // 128 * 128  # which it is: said for the compiler, who else stores bytes
    gl.store(p.V8 + (row * p.DP + line) * padded + (first + column), v8)


@gluon.jit
def factors(batch, head, begin, p):
    """What some channels of a head's values are multiplied with, and what is then taken from them."""
    channel = begin + gl.arange(0, CHANNELS, gl.SliceLayout(0, tokens_by_channels()))
    place = (batch * p.heads + head) * p.DV + channel
    there = (channel < p.DV) & (batch < p.batch)
    inverse = 1.0 / gl.load(p.V_SCALE + place, mask=there, other=1.0)
    return inverse, gl.load(p.V_MEAN + place, mask=there, other=0.0) * inverse


@gluon.jit
def prepare_all_values(boxes, p, s):
    """As many tiles as other programs prepare, next to each other."""
    all_tiles = (p.batch * p.heads).to(gl.int64) * p.tiles
    begin = (all_tiles * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (all_tiles * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    tile = begin % p.tiles
    head = begin // p.tiles % p.heads
    batch = begin // p.tiles // p.heads
    ahead, next_tile, next_head, next_batch = begin, tile, head, batch  # the next to fetch
    for c in range(p.STAGES - 1):
        if ahead < end:
            fetch(boxes, next_batch, next_head, next_tile, c, p, s)
        next_batch, next_head, next_tile = following(next_batch, next_head, next_tile, p)
        ahead += 1
    inverse, mean = factors(batch, head, 0, p)
    late_inverse, late_mean = factors(batch, head, p.DP - CHANNELS, p)  # of the last channels
    for n in range(begin, end):
        c = n - begin
        wait_for_all()  # both have read the tile before
        if ahead < end:
            fetch(boxes, next_batch, next_head, next_tile, c + p.STAGES - 1, p, s)
        next_batch, next_head, next_tile = following(next_batch, next_head, next_tile, p)
        ahead += 1
        tokens = fetched(c, p, s)
        row = (batch * p.heads + head).to(gl.int64)
        for part in gl.static_range(TILE // TOKENS):
            few = tokens.slice(part * TOKENS, TOKENS, 0)
            first = tile * TILE + part * TOKENS
            if p.DP == CHANNELS:
                prepare_part(row, first, 0, few, inverse, mean, p)
            else:
                prepare_part(row, first, 0, few.slice(0, CHANNELS, 1), inverse, mean, p)
                prepare_part(row, first, CHANNELS, few.slice(CHANNELS, CHANNELS, 1), late_inverse, late_mean, p)
        batch, head, tile = following(batch, head, tile, p)
        if tile == 0:
            inverse, mean = factors(batch, head, 0, p)
            late_inverse, late_mean = factors(batch, head, p.DP - CHANNELS, p)
