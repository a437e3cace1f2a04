"""One attention call of a context_parallel block: agree, move tokens to who computes them, attend, move rows back.

Ulysses works along the rows of the mesh: each rank gets its row's tokens of some heads. The ranks of a column, which
have the same heads, then make a ring. Where a column is one rank, it computes as a device alone would (`alone`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.distributed.agreement import agree
from sparge.distributed.budget import enforce_in_ring
from sparge.distributed.cargo import UNIT
from sparge.distributed.context import Parallel
from sparge.distributed.ring import attend_ring
from sparge.distributed.sharding import (
    Holding,
    Move,
    Shares,
    aligned,
    joined,
    length_of,
    overlaps,
    redistribute,
    union,
    within,
)
from sparge.distributed.ulysses import HeadSplit, from_heads, to_heads
from sparge.distributed.wire import PADDING, STATS, TO_BLOCKS, Team
from sparge.inputs import Inputs
from sparge.judging import Verdict
from sparge.packing import sequence_ends
from sparge.stages import Stats
from sparge.visibility import Visibility

Results = tuple[Tensor, Tensor | None, Stats | None]  # values [B, H, N, Dv], LSE [B, H, N]
Alone = Callable[[Inputs, SparseConfig], Results]


def attend_shards(
    inputs: Inputs, config: SparseConfig, parallel: Parallel, return_stats: bool, alone: Alone
) -> Results:
    """This rank's rows of attention over the whole sequence, and the stats of the whole."""
    job = Job.agreed(inputs, config, parallel, return_stats)
    mine = job.to_heads(inputs)
    sight = job.whole_sight(inputs)
    if parallel.ring.size == 1:
        results = alone(replace(mine, visibility=sight), job.config)
    else:
        results = _attend_rows(mine, job.rows_by_row, job.keys_by_row, sight, job.config, parallel.ring, return_stats)
    return job.from_heads(results, inputs.needs_lse)


def attend_packed_shards(
    inputs: Inputs,
    longest: tuple[int, int],
    config: SparseConfig,
    parallel: Parallel,
    return_stats: bool,
    alone: Alone,
    packed_alone: Alone,
) -> Results:
    """The same for sequences packed end to end; their ends count the tokens of all ranks."""
    packing = inputs.packing
    assert packing is not None
    job = Job.agreed(inputs, config, parallel, return_stats, packing.q_ends.tolist(), packing.k_ends.tolist())
    q_tokens, k_tokens = (sum(map(length_of, shares)) for shares in (job.rows, job.keys))
    q_ends = sequence_ends("cu_seqlens_q", packing.q_ends, q_tokens, "max_seqlen_q", longest[0])
    k_ends = sequence_ends("cu_seqlens_k", packing.k_ends, k_tokens, "max_seqlen_k", longest[1])
    mine = job.to_heads(inputs)
    if parallel.ring.size == 1:
        return job.from_heads(packed_alone(mine, job.config), inputs.needs_lse)
    sequences = [(q_ends[n], q_ends[n + 1], k_ends[n], k_ends[n + 1]) for n in range(packing.count)]
    return job.from_heads(_attend_sequences(mine, job, sequences, return_stats, alone), inputs.needs_lse)


@dataclass(frozen=True)
class Job:
    """What the ranks agreed on."""

    parallel: Parallel
    rows: Shares  # of every rank
    keys: Shares
    split: HeadSplit
    config: SparseConfig  # for this rank's heads

    @classmethod
    def agreed(
        cls, inputs: Inputs, config: SparseConfig, parallel: Parallel, return_stats: bool, *ends: list[int]
    ) -> Job:
        division = agree(inputs, config, parallel, return_stats, ends)
        config.check_heads(inputs.query.shape[1])
        split = HeadSplit.of(inputs, parallel.ulysses)
        return cls(parallel, division.rows, division.keys, split, split.config_for(config))

    @property
    def columns(self) -> slice:
        """The ranks of this one's row of the mesh."""
        size, row = self.parallel.ulysses.size, self.parallel.ring.rank
        return slice(row * size, (row + 1) * size)

    @property
    def rows_by_row(self) -> Shares:
        return _by_row(self.rows, self.parallel.ulysses.size)

    @property
    def keys_by_row(self) -> Shares:
        return _by_row(self.keys, self.parallel.ulysses.size)

    def to_heads(self, inputs: Inputs) -> Inputs:
        here = self.columns
        return to_heads(inputs, self.rows[here], self.keys[here], self.split, self.parallel.ulysses)

    def from_heads(self, results: Results, needs_lse: bool) -> Results:
        values, lse, stats = results
        sources = [values, lse[..., None]] if needs_lse and lse is not None else [values]
        moved = from_heads(sources, self.rows[self.columns], self.split, self.parallel.ulysses)
        whole = None if stats is None else self._whole_stats(stats)
        return moved[0], moved[1][..., 0] if len(moved) > 1 else None, whole

    def whole_sight(self, inputs: Inputs) -> Visibility:
        """What every row of the whole sequence sees; padding is gathered, a byte per key."""
        sight, lengths = inputs.visibility, [length_of(share) for share in self.keys]
        valid = sight.key_valid
        if valid is not None:
            valid = joined(self.parallel.gather(valid.contiguous(), lengths, 1, PADDING), self.keys, 1)
        return replace(sight, q_len=sum(map(length_of, self.rows)), k_len=sum(lengths), key_valid=valid)

    def _whole_stats(self, stats: Stats) -> Stats:
        """Counts of all rows and heads: added up along the ring, put side by side along Ulysses."""
        counts = [stats.executed, stats.visible, stats.skipped_pv]
        if stats.error is not None and stats.redone is not None:
            counts += [stats.error, stats.redone]
        ring, ulysses = self.parallel.ring, self.parallel.ulysses
        shapes = [[tuple(x.shape) for x in counts]] * ring.size
        summed = [torch.stack(of_all).sum(0) for of_all in zip(*ring.gather(counts, shapes, STATS), strict=True)]
        summed = [x.to(y.dtype) for x, y in zip(summed, counts, strict=True)]
        shapes = [[(len(x), len(heads)) for x in summed] for heads in self.split.query]
        whole = [torch.cat(of_all, 1) for of_all in zip(*ulysses.gather(summed, shapes, STATS), strict=True)]
        reason = f"{stats.reason} (a ring of {ring.size} by {ulysses.size} ranks of heads)"
        executed, visible, skipped, *judged = whole
        error, redone = judged or (None, None)
        return Stats(executed, visible, skipped, stats.backend, reason, stats.quantization, error, redone)


def _by_row(shares: Shares, columns: int) -> Shares:
    """What the ranks of each row of the mesh hold together."""
    return tuple(union(shares[n : n + columns]) for n in range(0, len(shares), columns))


def _attend_rows(
    local: Inputs, rows: Shares, keys: Shares, sight: Visibility, config: SparseConfig, ring: Team, return_stats: bool
) -> Results:
    """Blocks must not straddle ranks: each is moved to one of them first, and its rows back afterwards."""
    whole_rows, whole_keys = aligned(rows, config.block[0]), aligned(keys, UNIT)
    everything = tuple(range(local.query.shape[1]))

    def move(x: Tensor, have: Shares, want: Shares) -> Move:
        heads = everything[: x.shape[1]]
        return Move(x, *(tuple(Holding(heads, share) for share in shares) for shares in (have, want)))

    moves = [move(local.query, rows, whole_rows), *(move(x, keys, whole_keys) for x in (local.key, local.value))]
    query, key, value = redistribute(moves, ring, TO_BLOCKS)
    local = replace(local, query=query, key=key, value=value)
    result, verdict = attend_ring(local, whole_rows, whole_keys, sight, config, ring, return_stats), None
    if config.max_error is not None:
        result, verdict = enforce_in_ring(result, local, whole_rows, whole_keys, sight, ring)
    output = result.output
    assert output.lse is not None
    back = [move(x, whole_rows, rows) for x in (output.values, output.lse[..., None])]
    values, lse = redistribute(back, ring, TO_BLOCKS)
    choice = result.choice
    stats = Stats(
        result.executed, result.visible, output.skipped_pv, choice.backend.name, choice.reason,
        choice.config.quantization, *_told_once(verdict, ring),
    )  # fmt: skip
    return values, lse[..., 0], stats if return_stats else None


def _told_once(verdict: Verdict | None, ring: Team) -> tuple[Tensor | None, Tensor | None]:
    """Stats are added up along the ring: what all ranks know alike, the first of them tells."""
    if verdict is None:
        return None, None
    if ring.rank == 0:
        return verdict.error, verdict.over
    return torch.zeros_like(verdict.error), torch.zeros_like(verdict.over)


def _attend_sequences(
    local: Inputs, job: Job, sequences: list[tuple[int, int, int, int]], return_stats: bool, alone: Alone
) -> Results:
    """One packed sequence after the other. One that a single rank holds is that rank's alone, and moves nothing."""
    ring, rows, keys = job.parallel.ring, job.rows_by_row, job.keys_by_row
    heads = local.query.shape[1]
    values = local.query.new_zeros(*local.query.shape[:3], local.value.shape[3])
    lse = torch.full(local.query.shape[:3], -torch.inf, dtype=torch.float32, device=values.device)
    zero = torch.zeros(len(sequences), heads, dtype=torch.int64, device=values.device)
    stats = Stats(zero, zero.clone(), zero.clone(), "none", "this rank computed no sequence", "none")
    if job.config.max_error is not None:
        stats = replace(stats, error=zero.float(), redone=zero.bool())
    for n, (q_start, q_stop, k_start, k_stop) in enumerate(sequences):
        if q_start == q_stop or k_start == k_stop:
            continue
        own_rows = tuple(within(share, q_start, q_stop) for share in rows)
        own_keys = tuple(within(share, k_start, k_stop) for share in keys)
        query = _part(local.query, rows[ring.rank], q_start, q_stop)
        key, value = (_part(x, keys[ring.rank], k_start, k_stop) for x in (local.key, local.value))
        sight = replace(local.visibility, q_len=q_stop - q_start, k_len=k_stop - k_start)
        one = replace(local, query=query, key=key, value=value, visibility=sight, packing=None)
        holders = [rank for rank in range(ring.size) if own_rows[rank] or own_keys[rank]]
        if len(holders) > 1:
            part = _attend_rows(one, own_rows, own_keys, sight, job.config, ring, return_stats)
        elif holders == [ring.rank]:
            part = alone(one, job.config)
        else:
            continue
        before = 0
        for at, _, length in overlaps(rows[ring.rank], ((q_start, q_stop),)):
            values[:, :, at : at + length] = part[0][:, :, before : before + length]
            if part[1] is not None:
                lse[:, :, at : at + length] = part[1][:, :, before : before + length]
            before += length
        if part[2] is not None:
            stats = _with_row(stats, part[2], n)
    return values, lse, stats if return_stats else None


def _part(x: Tensor, share: tuple[tuple[int, int], ...], start: int, stop: int) -> Tensor:
    """The tokens of an interval among those that a rank holds."""
    runs = overlaps(share, ((start, stop),))
    return torch.cat([x[:, :, :0], *(x[:, :, at : at + length] for at, _, length in runs)], 2)


def _with_row(stats: Stats, row: Stats, n: int) -> Stats:
    for total, part in (
        (stats.executed, row.executed), (stats.visible, row.visible), (stats.skipped_pv, row.skipped_pv),
        (stats.error, row.error), (stats.redone, row.redone),
    ):  # fmt: skip
        if total is not None and part is not None:
            total[n] = part[0]
    return replace(stats, backend=row.backend, reason=row.reason, quantization=row.quantization)
