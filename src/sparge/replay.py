"""Calls that are nothing but launches, started again for other tensors.

A short call takes the host longer than the GPU: eight launches, and around them the making of tensors, views and
descriptors. All of that was known at the call before. A recording notes what each argument of each launch points at; a
replay allocates once, works out the addresses and starts the kernels.

Only a call whose every result comes from these launches can be repeated: whatever else torch is asked to compute
meanwhile, even a zero, refuses the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparge.stages import Output

aten = torch.ops.aten
ALLOCATIONS = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
)  # fmt: skip
MOST_BYTES = 1 << 27  # of one allocation: longer calls keep the GPU busy whatever the host does
ALIGNED = 512
MOST_READY = 256  # sets of addresses
QUERY, KEY, VALUE, OUTPUT, LSE, MEMORY, NOWHERE = range(7)  # what addresses count from

Start = Callable[..., None]
Given = Sequence[Any] | Callable[[], Sequence[Any]]  # tensors, and descriptors of tensors; or what makes them
_recording: ContextVar[Recording | None] = ContextVar("sparge_recording", default=None)


@dataclass
class Recording:
    """What happens in one call."""

    made: list[Tensor] = field(default_factory=list)  # kept, so that no address comes twice
    launches: list[tuple[Start, Sequence[Any], Sequence[Any], tuple[Any, ...]]] = field(default_factory=list)
    refusal: str | None = None


class _Watch(TorchDispatchMode):
    """Sees all that torch is asked for."""

    recording: Recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.recording.made.append(made)
        elif not func.is_view:
            self.recording.refusal = f"torch computes {func}"
        return made


@contextmanager
def recorded() -> Iterator[Recording]:
    """Of the call inside, in this thread."""
    watch = _Watch()  # type: ignore[no-untyped-call]
    watch.recording = recording = Recording()
    token = _recording.set(recording)
    try:
        with watch:
            yield recording
    finally:
        _recording.reset(token)


def note_launch(start: Start | None, given: Given, addresses: Sequence[Any], tail: tuple[Any, ...]) -> None:
    """A kernel is launched with what is given, at these addresses, and with numbers behind them."""
    recording = _recording.get()
    if recording is None:
        return
    if start is None:
        recording.refusal = "a kernel is launched for the first time"
    else:
        recording.launches.append((start, tensors_of(given), addresses, tail))


def tensors_of(given: Given) -> Sequence[Any]:
    return given() if callable(given) else given


class Address:
    """What a descriptor asks of the tensor that it describes."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Again:
    """One launch: its arguments are a stretch of all places, the numbers behind them always the same."""

    start: Start
    begin: int
    end: int
    boxes: tuple[tuple[int, type, dict[str, Any]], ...]  # descriptors: which argument, and all but their base
    tail: tuple[Any, ...]


@dataclass(frozen=True)
class Replay:
    """The launches of a call."""

    launches: tuple[Again, ...]
    places: tuple[tuple[int, int], ...]  # of the arguments of all launches: what they count from, and how far
    bytes: int  # of memory that nobody sees
    values: tuple[tuple[int, ...], tuple[int, ...]]  # size and stride of the output
    has_lse: bool
    kept: tuple[Tensor, ...]  # alive as long as their addresses are used
    ready: dict[tuple[int, ...], list[tuple[Start, list[Any]]]] = field(default_factory=dict, repr=False)  # by `first`

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        values = query.new_empty_strided(*self.values)
        lse = query.new_empty(values.shape[:3], dtype=torch.float32) if self.has_lse else None
        memory = query.new_empty(self.bytes, dtype=torch.uint8)
        first = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), values.data_ptr(), 0 if lse is None else lse.data_ptr(),
            memory.data_ptr(), 0,
        )  # fmt: skip
        started = self.ready.get(first)
        if started is None:
            started = self._arranged(first)
        for start, arguments in started:
            start(*arguments)
        return values, lse

    def _arranged(self, first: tuple[int, ...]) -> list[tuple[Start, list[Any]]]:
        """The arguments of every launch. Memory mostly comes back at addresses that it had before."""
        places: list[Any] = [first[base] + offset for base, offset in self.places]
        arranged = []
        for launch in self.launches:
            arguments = places[launch.begin : launch.end]
            for n, kind, fields in launch.boxes:
                arguments[n] = object.__new__(kind)
                arguments[n].__dict__.update(fields, base=Address(places[launch.begin + n]))
            arranged.append((launch.start, [*arguments, *launch.tail]))
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        self.ready[first] = arranged
        return arranged


def replay_of(recording: Recording, tensors: tuple[Tensor, Tensor, Tensor], output: Output) -> Replay | None:
    """Of a call with these tensors; None where repeating its launches would not repeat the call."""
    spans = None if recording.refusal is not None else Spans.of(recording, tensors, (output.values, output.lse))
    if spans is None:
        return None
    places, kept, launches = list[tuple[int, int]](), list[Tensor](), list[Again]()
    for start, given, addresses, tail in recording.launches:
        begin, boxes = len(places), []
        for n, (tensor, address) in enumerate(zip(given, addresses, strict=True)):
            if not isinstance(address, int):
                boxes.append((n, type(address), {name: x for name, x in vars(address).items() if name != "base"}))
                tensor = address.base
            place = spans.place(tensor)
            if place is None:
                return None
            places.append(place)
            if place[0] == NOWHERE:
                kept.append(tensor)
        launches.append(Again(start, begin, len(places), tuple(boxes), tail))
    shape = (tuple(output.values.shape), output.values.stride())
    return Replay(tuple(launches), tuple(places), spans.length, shape, output.lse is not None, tuple(kept))


@dataclass(frozen=True)
class Spans:
    """Which memory is what: first and last addresses, and the place of the first."""

    spans: tuple[tuple[int, int, tuple[int, int]], ...]
    given: frozenset[int]  # where the memory begins that the caller's tensors lie in
    length: int

    @classmethod
    def of(cls, recording: Recording, tensors: Sequence[Tensor], results: Sequence[Tensor | None]) -> Spans | None:
        first = [x.data_ptr() for x in tensors]
        if len(set(first)) < len(first):
            return None  # which of them is meant cannot be told
        spans, length = [(address, address, (base, 0)) for base, address in enumerate(first)], 0
        returned = {x.untyped_storage().data_ptr(): base for base, x in enumerate(results, OUTPUT) if x is not None}
        if any(x is not None and x.storage_offset() != 0 for x in results):
            return None
        for storage in (x.untyped_storage() for x in recording.made):
            begin, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes() - 1
            if last < begin:
                continue
            base = returned.pop(begin, MEMORY)
            spans.append((begin, last, (base, length if base == MEMORY else 0)))
            if base == MEMORY:
                length += -(-storage.nbytes() // ALIGNED) * ALIGNED
        if returned or length > MOST_BYTES:
            return None
        return cls(tuple(spans), frozenset(x.untyped_storage().data_ptr() for x in tensors), length)

    def place(self, x: Tensor) -> tuple[int, int] | None:
        """None: a part of a caller's tensor, which may lie elsewhere in the next."""
        address = x.data_ptr()
        for first, last, (base, offset) in self.spans:
            if first <= address <= last:
                return base, offset + address - first
        return None if x.untyped_storage().data_ptr() in self.given else (NOWHERE, address)
