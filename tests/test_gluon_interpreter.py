"""The interpreter of Gluon kernels finds the mistakes that such kernels make, and takes none where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from gluon_interpreter import machine
from gluon_interpreter.language import gl, gluon, hopper
from gluon_interpreter.layouts import places
from gluon_interpreter.machine import DeadlockError
from gluon_interpreter.memory import OutsideError
from gluon_interpreter.ptx import carry_out

mbarrier = hopper.mbarrier
SIDE = 64
STAGES = 2
SUMS = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])


@gluon.jit
def produce(boxes, s, p):
    for step in range(p.steps):
        stage, turn = step % STAGES, step // STAGES
        if p.mistake != "a stage is filled while it is read":
            mbarrier.wait(s.empty.index(stage), (turn & 1) ^ 1)
        bytes_due = 2 * SIDE * SIDE * (2 if p.mistake == "more bytes are expected than come" else 1)
        if p.mistake != "bytes come that nobody expects":
            mbarrier.expect(s.full.index(stage), bytes_due)
        hopper.tma.async_load(boxes, [step * SIDE, 0], s.full.index(stage), s.tiles.index(stage))


@gluon.jit
def consume(target, s, p):
    total = gl.zeros([SIDE, SIDE], gl.float32, SUMS)
    for step in range(p.steps):
        stage, turn = step % STAGES, step // STAGES
        if p.mistake != "a stage is read before it is full":
            mbarrier.wait(s.full.index(stage), turn & 1)
        total = hopper.warpgroup_mma(s.tiles.index(stage), s.one, total, is_async=True)
        if p.mistake == "a product is read that is under way":
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
        if p.mistake == "a stage is given back before the product has read it":
            mbarrier.arrive(s.empty.index(stage), count=1)
        if p.mistake != "nobody waits for the last product" or step + 1 < p.steps:
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
        if p.mistake == "a stage is given back twice":
            mbarrier.arrive(s.empty.index(stage), count=2)
        elif p.mistake not in (
            "a stage is given back before the product has read it", "a stage is never given back"
        ):  # fmt: skip
            mbarrier.arrive(s.empty.index(stage), count=1)
    if p.mistake == "nobody waits for the last product":
        return
    row = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(1, SUMS)), 1)
    column = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, SUMS)), 0)
    if p.mistake == "rows are written where nothing is":
        row = row + 1
    gl.store(target + (gl.program_id(0) * SIDE * SIDE + row * SIDE + column), total)


@gluon.jit
def add_up(boxes, target, steps, mistake):
    """The sum of tiles, through a ring of stages and the tensor core."""
    one = gl.allocate_shared_memory(gl.bfloat16, [SIDE, SIDE], None)
    near = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(1, SUMS)), 1)
    same = near == gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, SUMS)), 0)
    one.store(gl.where(same, 1.0, 0.0).to(gl.bfloat16))
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SIDE, SIDE], None)
    full, empty = (gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()) for _ in range(2))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    s, p = (
        SimpleNamespace(one=one, tiles=tiles, full=full, empty=empty),
        SimpleNamespace(steps=int(steps), mistake=mistake),
    )
    gl.warp_specialize([(consume, (target, s, p)), (produce, (boxes, s, p))], [1], [24])


def boxes_of(x: Tensor) -> SimpleNamespace:
    return SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[SIDE, SIDE], layout=None)


def sums(mistake: str, seed: int, steps: int = 5, programs: int = 2) -> tuple[Tensor, Tensor]:
    machine.chance.seed(seed)
    tiles = torch.randint(-8, 9, (steps * SIDE, SIDE)).bfloat16()
    out = torch.zeros(programs, SIDE, SIDE)
    add_up[(programs,)](boxes_of(tiles), out, steps, mistake=mistake)
    return out, tiles.float().reshape(steps, SIDE, SIDE).sum(0).expand(programs, -1, -1)


@pytest.mark.parametrize("seed", range(10))
def test_a_kernel_without_mistakes_is_right_in_any_order(seed):
    got, want = sums("", seed)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("mistake", "error"),
    [("a stage is never given back", DeadlockError), ("more bytes are expected than come", DeadlockError),
     ("rows are written where nothing is", OutsideError), ("nobody waits for the last product", AssertionError),
     ("a product is read that is under way", AssertionError)],
    ids=str,
)  # fmt: skip
def test_what_can_never_be_right_is_found_in_any_order(mistake, error):
    for seed in range(10):
        with pytest.raises(error):
            sums(mistake, seed)


@pytest.mark.parametrize(
    "mistake",
    ["a stage is read before it is full", "a stage is filled while it is read", "a stage is given back twice",
     "a stage is given back before the product has read it", "bytes come that nobody expects"],
)  # fmt: skip
def test_what_only_some_orders_show_is_found_in_most(mistake):
    found = 0
    for seed in range(20):
        try:
            got, want = sums(mistake, seed)
            found += not torch.equal(got, want)
        except (AssertionError, DeadlockError):
            found += 1
    assert found >= 15


def test_what_is_waited_for_is_computed_and_what_comes_after_stays_under_way():
    def two_products():
        tiles = gl.allocate_shared_memory(gl.bfloat16, [SIDE, SIDE], None)
        tiles.store(gl.full([SIDE, SIDE], 1.0, gl.bfloat16, SUMS))
        zeros = gl.zeros([SIDE, SIDE], gl.float32, SUMS)
        first, second = (hopper.warpgroup_mma(tiles, tiles, zeros, is_async=True) for _ in range(2))
        first = hopper.warpgroup_mma_wait(1, deps=(first,))
        assert (first.data == SIDE).all()
        assert second.result is None
        assert (hopper.warpgroup_mma_wait(0, deps=(second,)).data == SIDE).all()

    machine.Machine().run(two_products, 1)


def test_a_chip_finds_what_lies_outside_a_tensor_to_be_zero():
    tiles = torch.ones(SIDE + 8, SIDE).bfloat16()
    out = torch.zeros(1, SIDE, SIDE)
    add_up[(1,)](boxes_of(tiles), out, 2, mistake="")
    assert (out[0, :8] == 2).all()
    assert (out[0, 8:] == 1).all()


@pytest.mark.parametrize("count", [16, 64, 256])
def test_registers_hold_each_number_of_a_result_once(count):
    held = places(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, count, 16]), (64, count))
    assert held.shape == (4, 32, count // 2)
    assert sorted(held.flatten().tolist()) == list(range(64 * count))
    assert held[1, 5, :4].tolist() == [17 * count + 2, 17 * count + 3, 25 * count + 2, 25 * count + 3]


def test_threads_exchange_numbers_and_take_branches_of_their_own():
    code = """{ .reg .f32 o; .reg .pred p; .reg .b32 lane;
    shfl.sync.bfly.b32 o, $1, 2, 31, -1; add.f32 $0, o, $1; mov.u32 lane, %laneid; and.b32 lane, lane, 1;
    setp.ne.s32 p, lane, 0; @p bra.uni done; mul.f32 $0, $0, 10.0; done:; }"""
    lane = torch.arange(32).float().numpy()
    got = carry_out(code, {"$1": lane[None, None]})["$0"].reshape(-1)
    want = [(lane[n] + lane[n ^ 2]) * (1 if n % 2 else 10) for n in range(32)]
    assert got.tolist() == want


def test_each_thread_takes_one_of_two_branches():
    code = """{ .reg .pred p; setp.gt.f32 p, $1, 3.0; @!p bra.uni SMALL; add.f32 $0, $1, 100.0; bra.uni MADE;
    SMALL: add.f32 $0, $1, 10.0; MADE: add.f32 $0, $0, 1000.0; }"""
    got = carry_out(code, {"$1": torch.arange(6).float().numpy()})["$0"]
    assert got.tolist() == [1010, 1011, 1012, 1013, 1104, 1105]
