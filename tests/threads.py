"""Ranks as threads that take turns: rings on backends that have no second device, or are not made for threads."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import torch

from sparge.distributed.wire import Team, Traffic


class Meeting:
    """Where the ranks of one team leave things for each other. Only the rank whose turn it is runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn, self.barrier = threading.Lock(), threading.Barrier(size, timeout=300)
        self.left: list[object] = [None] * size
        self.mail = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def swap(self, rank: int, mine: object) -> list:
        """What every rank left."""
        self.left[rank] = mine
        self._let_others_run()
        everything = list(self.left)
        self._let_others_run()
        return everything

    def _let_others_run(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


@dataclass(frozen=True)
class ThreadTeam(Team):
    """A team whose messages stay in memory; shapes and types must still be what the receiver says."""

    meeting: Meeting = None

    def gather(self, tensors, shapes, purpose):
        arrived = self.meeting.swap(self.rank, [x.clone() for x in tensors])
        return [_as_announced(parts, theirs) for parts, theirs in zip(arrived, shapes, strict=True)]

    def exchange(self, outgoing, shapes, purpose):
        arrived = self.meeting.swap(self.rank, [[x.clone() for x in parts] for parts in outgoing])
        mine = [parts[self.rank] for parts in arrived]
        return [_as_announced(parts, theirs) for parts, theirs in zip(mine, shapes, strict=True)]

    def start(self, outgoing, target, shapes, source, like, purpose):
        if outgoing is not None:
            self.meeting.mail[self.rank, target].put([x.clone() for x in outgoing])
        return Mail(self, source, shapes)


@dataclass(frozen=True)
class Mail:
    team: ThreadTeam
    source: int
    shapes: list | None

    def wait(self):
        if self.shapes is None:
            return None
        meeting = self.team.meeting
        meeting.turn.release()
        try:
            parts = meeting.mail[self.source, self.team.rank].get(timeout=300)
        finally:
            meeting.turn.acquire()
        return _as_announced(parts, self.shapes)


def _as_announced(parts, shapes):
    assert [tuple(x.shape) for x in parts] == [tuple(shape) for shape in shapes]
    return parts


def run_threads(work, size: int) -> list:
    """work(team) in `size` threads: what each returned, rank by rank."""
    meeting, results, errors = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                device = torch.device("cpu")
                results[rank] = work(ThreadTeam(None, size, rank, device, Traffic(), meeting))
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
