"""The "probe" rule of a ring: sampled rows travel to the keys, and the shares that they give to blocks travel back.

No rank holds all keys of a row. Every rank scores the sampled rows of all against its own keys, twice: for their LSE,
of which the owners of the rows make that over all keys, then for the share of it that each block has. One number per
row and two bytes per pair of blocks are all that is told of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.distributed.sharding import Interval, Share, Shares
from sparge.distributed.wire import PROBE, Team
from sparge.probing import (
    SHARE_DTYPE,
    Scaled,
    best_of_groups,
    keys_to_probe,
    probe_positions,
    probe_scores,
    probe_shares,
    rows_to_probe,
)
from sparge.stages import Blocks
from sparge.visibility import Visibility

KEYS_AT_ONCE = 1 << 12  # whole blocks of any size
SCORES_AT_ONCE = 1 << 24  # in float32; about four tensors of that size exist at a time


def probe_in_ring(
    blocks: Blocks, rows: Shares, keys: Shares, sight: Visibility, config: SparseConfig, team: Team
) -> list[Tensor]:
    """`Blocks.probed` over all keys, of each of this rank's runs of rows.

    `blocks` are of rows[team.rank] and keys[team.rank], aligned to blocks; `sight` is that of the whole sequence.
    """
    probe = _gathered_rows(blocks, rows, keys[team.rank], sight, config, team)
    lse = _over_all_keys(probe.lse_of_own_keys(), rows, config, team)
    return _brought_home(probe.shares(lse), rows, keys, sight.k_len, config, team)


@dataclass(frozen=True)
class Probe:
    """The sampled rows of all ranks, and this rank's keys."""

    query: Tensor  # bfloat16 [B, Hq, R, D], rank by rank; int8 where attention is
    query_scale: Tensor | None  # float32 [B, Hq, R], of int8
    rows: Tensor  # int64 [query blocks, rows of each] on the host: where they stand in the whole sequence
    local: Blocks
    share: Share  # the keys that `local` holds
    sight: Visibility
    config: SparseConfig

    def lse_of_own_keys(self) -> Tensor:
        """float32 [B, Hq, R]; -inf where a row sees none of them."""
        lse = torch.full(self.query.shape[:3], -torch.inf, device=self.query.device)
        for blocks, _, scores in self._scores():
            some = self._rows_of(blocks)
            lse[:, :, some] = torch.logaddexp(lse[:, :, some], scores.flatten(-2).logsumexp(-1))
        return lse

    def shares(self, lse: Tensor) -> Tensor:
        """float16 [B, Hq, query blocks, key blocks]: what they give to this rank's blocks; `lse` is over all keys."""
        width = _count(self.share, self.config.block[1])
        shares = torch.zeros(*lse.shape[:2], len(self.rows), width, dtype=SHARE_DTYPE, device=lse.device)
        for blocks, column, scores in self._scores():
            part = probe_shares(scores.sub_(lse[:, :, self._rows_of(blocks), None, None]).exp_(), self.config)
            shares[:, :, blocks, column : column + part.shape[3]] = part
        return shares

    def _scores(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Some query blocks, from which of this rank's key blocks on, and the best scores of groups there."""
        batch, heads = self.query.shape[:2]
        position = self.rows + self.sight.offset
        for keys, column, key in self._some_keys():
            step = max(1, SCORES_AT_ONCE // (batch * heads * self.config.probe_rows * len(keys)))
            for first in range(0, len(self.rows), step):
                blocks = slice(first, min(first + step, len(self.rows)))
                low, high = (int(edge) for edge in position[blocks].aminmax())
                if keys.start > high + self.sight.right or keys.stop <= low - self.sight.left:
                    continue  # no row sees any
                some = self._rows_of(blocks)
                query = (self.query[:, :, some], None if self.query_scale is None else self.query_scale[:, :, some])
                rows = self.rows[blocks].flatten().to(self.query.device)
                scores = probe_scores(query, key, self.local.inputs.scale, self.sight, rows, keys)
                yield blocks, column, best_of_groups(scores, self.config.block[1])

    def _some_keys(self) -> Iterator[tuple[range, int, Scaled]]:
        """This rank's keys, some at a time: where in the sequence, from which of its blocks on, and what they are."""
        column, before, size = 0, 0, self.config.block[1]
        for start, stop in self.share:
            for first in range(start, stop, KEYS_AT_ONCE):
                keys = range(first, min(first + KEYS_AT_ONCE, stop))
                held = slice(before + keys.start - start, before + keys.stop - start)
                numbers, scale = keys_to_probe(self.local, held)
                yield keys, column + (first - start) // size, (numbers.float(), scale)
            column, before = column + _count(((start, stop),), size), before + stop - start

    def _rows_of(self, blocks: slice) -> slice:
        count = self.rows.shape[1]
        return slice(blocks.start * count, blocks.stop * count)


def _gathered_rows(
    local: Blocks, rows: Shares, share: Share, sight: Visibility, config: SparseConfig, team: Team
) -> Probe:
    standing = [_positions(run, run[0], config) for of_rank in rows for run in of_rank]
    counts = [_count(of_rank, config.block[0]) * config.probe_rows for of_rank in rows]
    own, before = [torch.zeros(0, dtype=torch.int64)], 0
    for start, stop in rows[team.rank]:
        own.append(_positions((start, stop), before, config).flatten())
        before += stop - start
    mine = [x for x in rows_to_probe(local, torch.cat(own).to(local.inputs.query.device)) if x is not None]
    shapes = [[(*x.shape[:2], count, *x.shape[3:]) for x in mine] for count in counts]
    arrived = [torch.cat(parts, 2) for parts in zip(*team.gather(mine, shapes, PROBE), strict=True)]
    query, *scales = arrived
    return Probe(query, scales[0] if scales else None, torch.cat(standing), local, share, sight, config)


def _positions(run: Interval, first: int, config: SparseConfig) -> Tensor:
    """The sampled rows of a run of whole blocks that begins at `first`; only the last of the sequence ends early."""
    return first + probe_positions(run[1] - run[0], config.block[0], config.probe_rows, torch.device("cpu"))


def _count(share: Share, size: int) -> int:
    """Blocks of some runs of whole ones."""
    return sum(-(-(stop - start) // size) for start, stop in share)


def _over_all_keys(lse: Tensor, rows: Shares, config: SparseConfig, team: Team) -> Tensor:
    """float32 [B, Hq, R]: put together by the owners of the rows, so that what moves does not grow with the ring."""
    counts = [_count(of_rank, config.block[0]) * config.probe_rows for of_rank in rows]
    shapes = [[(*lse.shape[:2], count)] for count in counts]
    parts = team.exchange([[part] for part in lse.split(counts, 2)], [shapes[team.rank]] * team.size, PROBE)
    mine = torch.stack([part for (part,) in parts]).logsumexp(0)
    return torch.cat([part for (part,) in team.gather([mine], shapes, PROBE)], 2)


def _wanted(rows: Shares, size: int) -> list[Tensor]:
    """For each rank, which of all ranks' query blocks it is told of: its own, and what stands before each run of them.

    Nothing stands before the first of the sequence: it stands there itself.
    """
    runs = [run for of_rank in rows for run in of_rank]
    standing = [block for start, stop in runs for block in range(start // size, -(-stop // size))]
    at = {block: place for place, block in enumerate(standing)}
    wanted = []
    for of_rank in rows:
        blocks = [[max(start // size - 1, 0), *range(start // size, -(-stop // size))] for start, stop in of_rank]
        wanted.append(torch.tensor([at[block] for run in blocks for block in run], dtype=torch.int64))
    return wanted


def _brought_home(
    shares: Tensor, rows: Shares, keys: Shares, k_len: int, config: SparseConfig, team: Team
) -> list[Tensor]:
    """What all ranks found for this rank's rows, each run of keys put in its place among all of them."""
    size = config.block[1]
    wanted = _wanted(rows, config.block[0])
    told = len(wanted[team.rank])
    shapes = [[(*shares.shape[:2], told, _count(of_rank, size))] for of_rank in keys]
    arrived = team.exchange([[shares[:, :, some.to(shares.device)]] for some in wanted], shapes, PROBE)
    whole = shares.new_zeros(*shares.shape[:2], told, -(-k_len // size))
    for (part,), share in zip(arrived, keys, strict=True):
        lengths = [_count((run,), size) for run in share]
        for (start, _), run in zip(share, part.split(lengths, 3), strict=True):
            whole[..., start // size : start // size + run.shape[3]] = run
    return list(whole.split([1 + _count((run,), config.block[0]) for run in rows[team.rank]], 2))
