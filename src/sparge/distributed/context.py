"""`with sparge.context_parallel(mesh):` and the cutting of sequences for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparge.distributed.sharding import SHARDINGS, joined, shares_of, split_evenly
from sparge.distributed.wire import Team, Traffic

MOST_SEGMENTS = 8


@dataclass(frozen=True)
class Parallel:
    """The ranks that share a sequence: `ring.size` rows of `ulysses.size` ranks, numbered row by row."""

    ring: Team
    ulysses: Team
    sharding: str
    segments: tuple[int, ...] | None
    traffic: Traffic

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    def gather(self, x: Tensor, lengths: list[int], dim: int, purpose: str) -> list[Tensor]:
        """Every rank's x, whose extents along `dim` are `lengths`."""

        def shape(length: int) -> tuple[int, ...]:
            return (*x.shape[:dim], length, *x.shape[dim + 1 :])

        columns = self.ulysses.size
        rows = [lengths[n : n + columns] for n in range(0, self.size, columns)]
        mine = rows[self.ring.rank]
        row = [parts[0] for parts in self.ulysses.gather([x], [[shape(length)] for length in mine], purpose)]
        grid = self.ring.gather(row, [[shape(length) for length in one] for one in rows], purpose)
        return [part for parts in grid for part in parts]


_open_blocks = 0  # in all threads
_active: ContextVar[Parallel | None] = ContextVar("sparge_context_parallel", default=None)


def current_parallel() -> Parallel | None:
    """The innermost open block of this thread or task."""
    return _active.get()


def in_block() -> bool:
    """Whether a block is open here; for code that torch.compile traces, which sees no ContextVar, open anywhere."""
    return _open_blocks > 0 if torch.compiler.is_compiling() else _active.get() is not None


def refuse_in_block(function: str) -> None:
    if in_block():
        raise RuntimeError(
            f"{function} would see this rank's shard only: call it outside the context_parallel block, or use "
            "sparge.attention inside."
        )


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    sharding: str = "contiguous",
    segments: tuple[int, ...] | None = None,
    timeout: float | None = None,
    ring: str = "ring",
    ulysses: str = "ulysses",
) -> Iterator[Traffic]:
    """Inside the block, sparge.attention and sparge.varlen_attention take shards of one sequence and return a shard.

    mesh      a DeviceMesh with a dimension called "ring", one called "ulysses", or both; ranks are numbered row by
              row, ring rows of ulysses ranks
    sharding  "contiguous": rank n holds the n-th part, of any length; "zigzag": of 2 x ranks equal chunks, the n-th
              from either end, which balances causal attention. `shard_sequence` cuts either way
    segments  how many of this rank's tokens belong to each of several parts of the sequence that were cut one by one,
              as text and image tokens are: (text tokens, image tokens). None: one part
    timeout   seconds that a rank waits for another before it raises: sets that of the mesh's process groups, which
              do not take over init_process_group's (30 minutes with gloo, 10 with NCCL). None: leaves it as it is
    ring, ulysses  what the mesh calls its dimensions

    Every rank of the mesh must make the same calls. The mask is the one a single device would choose. The Traffic that
    the block gives counts what this rank sent.
    """
    parallel = _parallel(mesh, sharding, ring, ulysses, segments, timeout)
    global _open_blocks
    token, _open_blocks = _active.set(parallel), _open_blocks + 1
    try:
        yield parallel.traffic
    finally:
        _active.reset(token)
        _open_blocks -= 1


def shard_sequence(
    x: Tensor,
    mesh: DeviceMesh,
    dim: int = 2,
    *,
    sharding: str = "contiguous",
    ring: str = "ring",
    ulysses: str = "ulysses",
) -> Tensor:
    """This rank's part of a tensor that every rank has, cut along `dim` as `context_parallel` expects it.

    Cut positions like their tokens: a model needs to know where its tokens stand.
    """
    parallel = _parallel(mesh, sharding, ring, ulysses)
    mine = split_evenly(x.shape[dim], parallel.size, parallel.sharding)[parallel.rank]
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in mine], dim)


def gather_sequence(
    x: Tensor,
    mesh: DeviceMesh,
    dim: int = 2,
    *,
    sharding: str = "contiguous",
    ring: str = "ring",
    ulysses: str = "ulysses",
) -> Tensor:
    """The whole of a tensor that the ranks hold parts of, on every rank: the reverse of `shard_sequence`."""
    parallel = _parallel(mesh, sharding, ring, ulysses)
    dim %= x.dim()
    mine = torch.tensor([x.shape[dim]], device=x.device)
    lengths = [int(n) for n in parallel.gather(mine, [1] * parallel.size, 0, "lengths")]
    parts = parallel.gather(x, lengths, dim, "gathered shards")
    return joined(parts, shares_of(tuple((n,) for n in lengths), parallel.sharding), dim)


def _parallel(
    mesh: DeviceMesh,
    sharding: str,
    ring: str,
    ulysses: str,
    segments: tuple[int, ...] | None = None,
    timeout: float | None = None,
) -> Parallel:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}.")
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {SHARDINGS}, not {sharding!r}.")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= {ring, ulysses}:
        raise ValueError(
            f"mesh has dimensions {names or 'without names'}; it must have {ring!r}, {ulysses!r} or both, no other: "
            f"name them (mesh_dim_names), take a part (mesh[{ring!r}]), or say what they are called (ring=, ulysses=)."
        )
    _check_segments(segments)
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a number of seconds above 0, or None, not {timeout!r}.")
    traffic = Traffic()
    teams = [_team(mesh, name, timeout, traffic) for name in (ring, ulysses)]
    return Parallel(teams[0], teams[1], sharding, segments, traffic)


def _team(mesh: DeviceMesh, name: str, timeout: float | None, traffic: Traffic) -> Team:
    names = mesh.mesh_dim_names or ()
    size = mesh.size(names.index(name)) if name in names else 1
    device = torch.device(mesh.device_type)
    if size == 1:
        return Team(None, 1, 0, device, traffic)
    group = mesh.get_group(name)
    if timeout is not None:
        from torch.distributed.distributed_c10d import _set_pg_timeout  # torch may be built without it

        _set_pg_timeout(timedelta(seconds=timeout), group)
    return Team(group, size, mesh.get_local_rank(name), device, traffic)


def _check_segments(segments: object) -> None:
    if segments is None:
        return
    whole = isinstance(segments, tuple) and all(type(n) is int and n >= 0 for n in segments)
    if not whole or not 1 <= len(segments) <= MOST_SEGMENTS:  # type: ignore[arg-type]
        raise ValueError(
            f"segments must be a tuple of up to {MOST_SEGMENTS} numbers of tokens of this rank, not {segments!r}."
        )
