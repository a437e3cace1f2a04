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
    on_run: Callable[[Run], None] | None = None

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
def observed(on_run: Callable[[Run], None] | None = None) -> Iterator[Observed]:
    """Only in this thread or asyncio task; of nested blocks the innermost counts.

    on_run  is also called with each run: its inputs, mask and output, which a longer memory would have to copy

    >>> import sparge, torch
    >>> q = torch.randn(1, 2, 256, 32)
    >>> with observed() as seen:
    ...     out = sparge.attention(q, q, q)
    >>> len(seen.calls), seen.executed, seen.visible
    (1, 16, 16)
    """
    seen = Observed(on_run=on_run)
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
