"""How bytes move between ranks: gathered, exchanged or sent ahead of their use; counted, and never waited for forever.

Tensors of one message travel as one run of bytes, so that any mixture of types is one transfer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 16  # bytes; where each tensor of a message begins

# What moves, for whom it fails and in the counts of Traffic.
SETTINGS = "shapes and settings"
PADDING = "key padding"
TO_HEADS = "tokens to the ranks of their heads"
FROM_HEADS = "outputs to the ranks of their tokens"
TO_BLOCKS = "tokens of blocks that two ranks share"
SAMPLE = "the sample"
SUMMARIES = "block means"
PROBE = "rows of the probe"
NEEDS = "needs"
KEYS_AND_VALUES = "keys and values"
BUDGET = "rows of the error budget"
STATS = "stats"

Shape = tuple[int, ...]


@dataclass
class Traffic:
    """Bytes that this rank has handed to others inside one `context_parallel` block, by what they were for."""

    sent: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.sent.total()

    def __str__(self) -> str:
        return "\n".join(f"{count:>14,} bytes: {purpose}" for purpose, count in self.sent.most_common())


@dataclass(frozen=True)
class Form:
    """A tensor without its data."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """With the padding behind it."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Team:
    """The ranks along one dimension of a mesh. A rank alone has no group, and moves nothing."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    device: torch.device  # of the mesh
    traffic: Traffic

    def gather(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[Shape]], purpose: str) -> list[list[Tensor]]:
        """Everybody's tensors; `shapes` says those of every rank."""
        if self.size == 1:
            return [list(tensors)]
        forms = [_forms(tensors, theirs) for theirs in shapes]
        longest = max(_bytes_of(theirs) for theirs in forms)
        mine = torch.nn.functional.pad(_packed(tensors), (0, longest - _bytes_of(forms[self.rank])))
        carried = self._to_carrier(mine)
        arrived = [torch.empty_like(carried) for _ in range(self.size)]
        with _contact(purpose):
            dist.all_gather(arrived, carried, group=self.group)
        self.traffic.sent[purpose] += longest * (self.size - 1)
        return [_unpacked(x.to(mine.device), theirs) for x, theirs in zip(arrived, forms, strict=True)]

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], purpose: str
    ) -> list[list[Tensor]]:
        """outgoing[n] goes to rank n; what rank n has for this one comes back, in the given shapes."""
        if self.size == 1:
            return [list(outgoing[0])]
        forms = [_forms(outgoing[self.rank], theirs) for theirs in shapes]
        sizes_out = [_bytes_of([_form(x) for x in tensors]) for tensors in outgoing]
        sizes_in = [_bytes_of(theirs) for theirs in forms]
        packed = _packed([x for tensors in outgoing for x in tensors])
        carried = self._to_carrier(packed)
        arrived = carried.new_empty(sum(sizes_in))
        with _contact(purpose):
            dist.all_to_all_single(arrived, carried, sizes_in, sizes_out, group=self.group)
        self.traffic.sent[purpose] += sum(sizes_out) - sizes_out[self.rank]
        parts = arrived.to(packed.device).split(sizes_in)
        return [_unpacked(x, theirs) for x, theirs in zip(parts, forms, strict=True)]

    def start(
        self,
        outgoing: Sequence[Tensor] | None,
        target: int,
        shapes: Sequence[Shape] | None,
        source: int,
        like: Sequence[Tensor],
        purpose: str,
    ) -> Transfer:
        """Begin to send to `target` and to receive from `source`; None: nothing. `like` has the tensors' types."""
        operations, kept = [], []
        if outgoing is not None:
            kept.append(self._to_carrier(_packed(outgoing)))
            operations.append(dist.P2POp(dist.isend, kept[0], group=self.group, group_peer=target))
            self.traffic.sent[purpose] += len(kept[0])
        arriving, forms = None, None
        if shapes is not None:
            forms = _forms(like, shapes)
            arriving = self._to_carrier(like[0].new_empty(0, dtype=torch.uint8)).new_empty(_bytes_of(forms))
            operations.append(dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=source))
        with _contact(purpose):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, kept, arriving, forms, like[0].device, purpose)

    def _to_carrier(self, x: Tensor) -> Tensor:
        """gloo moves bytes of host memory only, NCCL those of its GPU."""
        return x.cpu() if dist.get_backend(self.group) == "gloo" else x.to(self.device)


@dataclass(frozen=True)
class Transfer:
    """One message that is on its way from this rank, and one that is on its way to it."""

    works: list[dist.Work]
    leaving: list[Tensor]  # kept until they have left
    arriving: Tensor | None
    forms: list[Form] | None
    device: torch.device
    purpose: str

    def wait(self) -> list[Tensor] | None:
        """What arrived, or None if nothing was to come. On a GPU it is the stream that waits."""
        with _contact(self.purpose):
            for work in self.works:
                work.wait()
        if self.arriving is None or self.forms is None:
            return None
        return _unpacked(self.arriving.to(self.device), self.forms)


@contextmanager
def _contact(purpose: str) -> Iterator[None]:
    """A dead or silent rank shows as one of torch's long messages, after the timeout at the latest."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        short = first_line if len(first_line) <= 160 else first_line[:160] + "..."
        raise RuntimeError(
            f"Contact between the ranks was lost while they moved {purpose}: a rank has died, has left the "
            f"context_parallel block, or is later than the timeout allows ({short.rstrip('.')})."
        ) from error


def _form(x: Tensor) -> Form:
    return Form(tuple(x.shape), x.dtype)


def _forms(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Form]:
    """The types of these tensors in other shapes."""
    return [Form(tuple(shape), x.dtype) for x, shape in zip(tensors, shapes, strict=True)]


def _bytes_of(forms: Sequence[Form]) -> int:
    return sum(form.bytes for form in forms)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """One copy of each, whatever its strides."""
    forms = [_form(x) for x in tensors]
    buffer = tensors[0].new_empty(_bytes_of(forms), dtype=torch.uint8)
    for place, x in zip(_unpacked(buffer, forms), tensors, strict=True):
        place.copy_(x)
    return buffer


def _unpacked(buffer: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    tensors, start = [], 0
    for form in forms:
        flat = buffer[start : start + math.prod(form.shape) * form.dtype.itemsize]
        tensors.append(flat.view(form.dtype).view(form.shape))
        start += form.bytes
    return tensors
