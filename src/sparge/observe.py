"""`with observed() as seen:` collects the stats of every sparge call inside, whoever made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparge.stages import Stats

if TYPE_CHECKING:
    from sparge.api import Run


@dataclass
class Observed:
    """The calls of one block. Reading the numbers waits for the device."""

    calls: list[Stats] = field(default_factory=list)
    dense: Counter[str] = field(default_factory=Counter)  # calls that never came to sparge.attention, by the reason
    on_run: Callable[[Run], None] | None = None
    on_dense: Callable[[str], None] | None = None

    @property
    def executed(self) -> int:
        """Blocks computed."""
        return sum(int(stats.executed.sum()) for stats in self.calls)

    @property
    def visible(self) -> int:
        """Blocks that hold at least one visible pair."""
        return sum(int(stats.visible.sum()) for stats in self.calls)

    @property
    def backends(self) -> Counter[str]:
        """How many calls each backend computed."""
        return Counter(stats.backend for stats in self.calls)


_open: ContextVar[Observed | None] = ContextVar("sparge_observed", default=None)


@contextmanager
def observed(
    on_run: Callable[[Run], None] | None = None, on_dense: Callable[[str], None] | None = None
) -> Iterator[Observed]:
    """Only in this thread or asyncio task; of nested blocks the innermost counts.

    on_run    is also called with each run: its inputs, mask and output, which a longer memory would have to copy
    on_dense  is also called with the reason of each call that a patched model has to leave to dense attention

    >>> import sparge, torch
    >>> q = torch.randn(1, 2, 256, 32)
    >>> with observed() as seen:
    ...     out = sparge.attention(q, q, q)
    >>> len(seen.calls), seen.executed, seen.visible
    (1, 16, 16)
    """
    seen = Observed(on_run=on_run, on_dense=on_dense)
    token = _open.set(seen)
    try:
        yield seen
    finally:
        _open.reset(token)


def is_observed() -> bool:
    return _open.get() is not None


def note(run: Run) -> None:
    """Called after each run of the pipeline; without an open block nothing is computed."""
    seen = _open.get()
    if seen is None:
        return
    seen.calls.append(run.stats())
    if seen.on_run is not None:
        seen.on_run(run)


def note_dense(reason: str) -> None:
    """Called where a patched model leaves a call to dense attention that was to be sparse."""
    seen = _open.get()
    if seen is None:
        return
    seen.dense[reason] += 1
    if seen.on_dense is not None:
        seen.on_dense(reason)
