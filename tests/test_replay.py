"""Calls that are only launches are started again without the whole way; they must do the same to other tensors.

Interpreted, the kernels run: what a replay computes is compared. Otherwise they are noted: where each argument points.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from problems import INTERPRETED, randn
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton.experimental.gluon")

import sparge
from sparge import SparseConfig, backends, calls, replay
from sparge.backends.hopper import launch
from sparge.backends.hopper.boxes import descriptor
from sparge.backends.hopper.launch import HopperBackend
from sparge.backends.triton.dispatch import Launch
from sparge.backends.triton.launch import TritonBackend
from sparge.observe import observed

CASES = {
    "default": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "tokens first": ({}, {"layout": "BSHD", "window": (100, 0)}),
    "int8": ({"quantization": "int8"}, {"is_causal": True}),
    "16 bits": ({"quantization": "none", "rule": ("threshold", "gap")}, {"return_lse": True}),
    "a search": ({"rule": ("cdf", "topk"), "cdf": (0.9, 0.8, 0.7, 0.6), "topk": 0.2}, {"scale": 0.2}),
}
each_case = pytest.mark.parametrize("case", CASES)


@dataclass
class Noted:
    """One launch: its arguments, and how the tensors behind them lie in memory."""

    kernel: str
    arguments: list[int]
    boxes: list[int]  # which of them describe a tensor
    tail: tuple[object, ...]
    memory: list[tuple[int, int] | None] = field(default_factory=list)  # begin and size; None: of nothing


def pointer(x: object) -> int:
    return x if isinstance(x, int) else x.base.data_ptr()


@pytest.fixture
def noted(monkeypatch) -> list[Noted]:
    """Instead of launching."""
    found: list[Noted] = []
    starts: dict[Launch, replay.Start] = {}  # of those launched before

    def note(self, given, addresses):
        tail = (*self.numbers, *self.constants.items())

        def start(*arguments):
            count = len(arguments) - len(tail)
            boxes = [n for n, x in enumerate(arguments[:count]) if not isinstance(x, int)]
            found.append(Noted(self.kernel.__name__, [*map(pointer, arguments[:count])], boxes, arguments[count:]))

        replay.note_launch(starts.get(self), given, addresses, tail)
        starts[self] = start
        start(*addresses, *tail)
        tensors = (x if isinstance(x, Tensor) else x.base for x in replay.tensors_of(given))
        found[-1].memory = [
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) if x.numel() else None for x in tensors
        ]

    monkeypatch.setattr(Launch, "__call__", note)
    return found


@pytest.fixture(params=[HopperBackend, TritonBackend], ids=["hopper", "triton"])
def backend(request, monkeypatch):
    """The only one there is; it takes tensors of this machine."""
    here = request.param()
    for name in ("unavailable", "unsupported"):
        monkeypatch.setattr(type(here), name, lambda self, *_: None)
    monkeypatch.setattr(type(here), "default_quantization", lambda self, device: "int8-fp8")
    monkeypatch.setattr(launch, "_processors", lambda device: 3)
    monkeypatch.setattr(backends, "BACKENDS", (here,))
    yield here
    launch._plan.cache_clear()


def three(seed: int, layout: str = "BHSD") -> list[Tensor]:
    shapes = [(1, heads, 150 if INTERPRETED else 300, 64) for heads in (4, 2, 2)]
    tensors = [randn(seed + n, *shape, dtype=torch.bfloat16) for n, shape in enumerate(shapes)]
    return [x.transpose(1, 2).contiguous() for x in tensors] if layout == "BSHD" else tensors


def attend(tensors: list[Tensor], case: str, **more):
    settings, arguments = CASES[case]
    return sparge.attention(*tensors, enable_gqa=True, config=SparseConfig(**settings), **arguments, **more)


def in_tuple(result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def only_kind() -> calls.Known:
    (known,) = calls._known.values()
    return known


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
@each_case
def test_every_argument_points_where_the_whole_way_would_point(case, backend, noted):
    tensors, others = (three(seed, CASES[case][1].get("layout", "BHSD")) for seed in (0, 10))
    attend(tensors, case)
    noted.clear()
    results, whole = in_tuple(attend(tensors, case)), list(noted)
    assert only_kind().replay is not None
    noted.clear()
    others_results, again = in_tuple(attend(others, case)), list(noted)
    assert [x.kernel for x in again] == [x.kernel for x in whole]
    assert [x.tail for x in again] == [x.tail for x in whole]
    assert [x.boxes for x in again] == [x.boxes for x in whole]

    pairs = [
        (a, b, *memory)
        for x, y in zip(whole, again, strict=True)
        for a, b, memory in zip(x.arguments, y.arguments, x.memory, strict=True)
        if memory is not None
    ]
    own = {}  # where memory of the first call begins, and where that of the second does
    seen = zip((*tensors, *results), (*others, *others_results), strict=True)
    given = {x.data_ptr(): y.data_ptr() for x, y in seen}
    for a, b, begin, size in pairs:
        if a in given:
            assert b == given[a]
        elif a != b or begin in own:
            assert own.setdefault(begin, (b - (a - begin), size)) == (b - (a - begin), size)
    assert len(own) >= 5
    stretches = sorted(own.values())
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(stretches))
    assert {x.data_ptr() for x in others_results} <= {address for x in again for address in x.arguments}


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_memory_at_the_same_place_needs_no_addresses_anew(backend, noted):
    for _ in range(6):
        attend(three(0), "default")
    ready = only_kind().replay.ready
    assert 1 <= len(ready) <= 4
    count = len(noted)
    attend(three(0), "default")
    assert len(noted) - count == len(only_kind().replay.launches)


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_only_so_many_sets_of_addresses_are_kept(backend, noted, monkeypatch):
    monkeypatch.setattr(replay, "MOST_READY", 2)
    kept = [three(seed) for seed in range(7)]
    for tensors in kept:
        attend(tensors, "default")
        assert only_kind().replay is None or len(only_kind().replay.ready) <= 2


def whole_way(noted: list[Noted], tensors: list[Tensor], **how) -> bool:
    """Whether a third call went it: notes of replays have no memory."""
    for _ in range(3):
        noted.clear()
        sparge.attention(*tensors, enable_gqa=True, **how)
    return all(x.memory for x in noted)


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_what_is_more_than_launches_is_not_replayed(backend, noted, monkeypatch):
    q, k, v = three(0)
    assert not whole_way(noted, [q, k, v])
    assert whole_way(noted, [q, k, v], config=SparseConfig(pv_threshold=-4.0))  # counts what it skips
    assert whole_way(noted, [q, k, v], scale=-0.1)  # turns the queries round
    assert whole_way(noted, [q, k, v], config=SparseConfig(rule="topk", topk=1.0))  # makes a mask of all blocks
    assert not whole_way(noted, [q, k, k])
    calls.forget()
    assert whole_way(noted, [q, k, k])  # which of two is meant cannot be told when that is recorded
    calls.forget()
    monkeypatch.setattr(replay, "MOST_BYTES", 1000)
    assert whole_way(noted, [q, k, v])


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_what_other_backends_do_is_not_recorded():
    for _ in range(3):
        stats = sparge.attention(*three(0), enable_gqa=True, config=SparseConfig(), return_stats=True)[1]
        sparge.attention(*three(0), enable_gqa=True, config=SparseConfig(quantization="none"))
    assert stats.backend not in ("hopper", "triton")
    assert len(calls._known) == 2
    assert not any(known.recorded for known in calls._known.values())


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_parts_of_a_callers_tensor_are_not_replayed(backend, noted, monkeypatch):
    """They may lie elsewhere in the next call's."""
    whole_attend, look = type(backend).attend, Launch(SimpleNamespace(__name__="look"), 1, (), {})

    def attend_after_a_look(self, blocks, mask, config):
        part = blocks.inputs.key[:, :, 5:]
        look([part], [part.data_ptr()])
        return whole_attend(self, blocks, mask, config)

    monkeypatch.setattr(type(backend), "attend", attend_after_a_look)
    assert whole_way(noted, three(0))


@pytest.mark.skipif(INTERPRETED, reason="kernels are not launched")
def test_who_asks_for_more_than_the_result_goes_the_whole_way(backend, noted):
    tensors = three(0)
    for _ in range(3):
        attend(tensors, "default")
    noted.clear()
    attend(tensors, "default")
    assert not any(x.memory for x in noted)
    noted.clear()
    attend(tensors, "default", return_stats=True)
    assert all(x.memory for x in noted)
    noted.clear()
    with observed() as seen:
        attend(tensors, "default")
    assert len(seen.calls) == 1
    assert all(x.memory for x in noted)


def at(address: int, like: Tensor) -> Tensor:
    """What lies at an address, as a tensor of the same kind."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    raw = (ctypes.c_char * (extent * like.element_size())).from_address(address)
    numbers = torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype)
    return numbers.as_strided(like.shape, like.stride())


def seen_at(place, like):
    """What a kernel is given: a tensor, or a descriptor of one."""
    if isinstance(place, int):
        return at(place, like) if like.numel() else like.clone()
    base = at(pointer(place), like.base)
    return descriptor(base, tuple(place.shape), tuple(place.strides), tuple(place.block_shape))


@pytest.fixture
def started_at_addresses(monkeypatch):
    """Interpreted kernels are started as compiled ones are."""
    starts: dict[Launch, replay.Start] = {}

    def launch_or_start(self, given, addresses):
        likes = replay.tensors_of(given)

        def start(*places):
            with _disable_current_modes():  # what the interpreter asks of torch is not recorded
                tensors = map(seen_at, places, likes)
                self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)

        replay.note_launch(starts.get(self), given, addresses, ())
        starts[self] = start
        start(*addresses)

    monkeypatch.setattr(Launch, "__call__", launch_or_start)


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels in the interpreter")
@each_case
def test_a_replay_computes_what_the_whole_way_computes(case, backend, started_at_addresses, request):
    layout = CASES[case][1].get("layout", "BHSD")
    for seed in (0, 10):
        attend(three(seed, layout), case)
    assert only_kind().replay is not None
    request.getfixturevalue("poisoned")  # not before, for it computes
    got = attend(three(20, layout), case)
    calls.forget()
    want = attend(three(20, layout), case)
    for a, b in zip(in_tuple(got), in_tuple(want), strict=True):
        assert torch.equal(a, b)
