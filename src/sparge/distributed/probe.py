"""The "probe" rule of a ring: sampled rows travel to the keys, and the bits of the blocks they claim travel back.

No rank holds all keys of a row. Every rank scores the sampled rows of all against its own keys, twice: for their LSE,
of which the owners of the rows make that over all keys, then for the blocks that hold more than their share of it. One
number per row and one bit per block are all that is told of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.distributed.sharding import Interval, Share, Shares
from sparge.distributed.wire import PROBE, Team
from sparge.inputs import Inputs
from sparge.probing import probe_claims, probe_positions, probe_scores
from sparge.visibility import Visibility
from sparge.words import WORD, or_into, pack

KEYS_AT_ONCE = 1 << 12  # whole words of blocks of any size
SCORES_AT_ONCE = 1 << 24  # in float32; about four tensors of that size exist at a time


def scores_alone(config: SparseConfig) -> SparseConfig:
    """Without the probe. Where no other rule is left, a row's best block is kept, as by a gap of 0."""
    others = tuple(name for name in config.rule if name != "probe")
    return replace(
        config,
        rule=others or "gap",
        gap=config.gap if others else 0.0,
        probe=SparseConfig.probe,
        probe_rows=SparseConfig.probe_rows,
    )


def claims_in_ring(
    local: Inputs, rows: Shares, keys: Shares, sight: Visibility, config: SparseConfig, team: Team
) -> Tensor:
    """int32 [B, Hq, this rank's query blocks, words]: which of all key blocks their sampled rows claim.

    `local` holds rows[team.rank] and keys[team.rank], aligned to blocks; `sight` is that of the whole sequence.
    """
    probe = _gathered_rows(local, rows, keys[team.rank], sight, config, team)
    lse = _over_all_keys(probe.lse_of_own_keys(), rows, config, team)
    return _brought_home(probe.claims(lse), rows, keys, sight.k_len, config, team)


@dataclass(frozen=True)
class Probe:
    """The sampled rows of all ranks, and this rank's keys."""

    query: Tensor  # bfloat16 [B, Hq, R, D], rank by rank
    rows: Tensor  # int64 [query blocks, rows of each] on the host: where they stand in the whole sequence
    local: Inputs
    share: Share  # the keys that `local` holds
    sight: Visibility
    config: SparseConfig

    def lse_of_own_keys(self) -> Tensor:
        """float32 [B, Hq, R]; -inf where a row sees none of them."""
        lse = torch.full(self.query.shape[:3], -torch.inf, device=self.query.device)
        for blocks, _, scores in self._scores():
            some = self._rows_of(blocks)
            lse[:, :, some] = torch.logaddexp(lse[:, :, some], scores.logsumexp(-1))
        return lse

    def claims(self, lse: Tensor) -> Tensor:
        """int32 [B, Hq, query blocks, words]: which of this rank's blocks they claim; `lse` is over all keys."""
        words = sum(_words_of_runs(self.share, self.config))
        bits = torch.zeros(*lse.shape[:2], len(self.rows), words, dtype=torch.int32, device=lse.device)
        for blocks, word, scores in self._scores():
            part = pack(probe_claims(scores, lse[:, :, self._rows_of(blocks)], 1.0, self.config))
            bits[:, :, blocks, word : word + part.shape[3]] = part
        return bits

    def _scores(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Some query blocks, the word where the bits of some keys begin, and the blocks' scores for those."""
        batch, heads = self.query.shape[:2]
        position = self.rows + self.sight.offset
        for keys, word, key in self._some_keys():
            step = max(1, SCORES_AT_ONCE // (batch * heads * self.config.probe_rows * len(keys)))
            for first in range(0, len(self.rows), step):
                blocks = slice(first, min(first + step, len(self.rows)))
                low, high = (int(edge) for edge in position[blocks].aminmax())
                if keys.start > high + self.sight.right or keys.stop <= low - self.sight.left:
                    continue  # no row sees any
                query = self.query[:, :, self._rows_of(blocks)].float()
                rows = self.rows[blocks].flatten().to(key.device)
                yield blocks, word, probe_scores(query, key, self.local.scale, self.sight, rows, keys)

    def _some_keys(self) -> Iterator[tuple[range, int, Tensor]]:
        """This rank's keys, some at a time: where in the sequence, at which word of its bits, rounded to bfloat16."""
        word, before = 0, 0
        for (start, stop), words in zip(self.share, _words_of_runs(self.share, self.config), strict=True):
            for first in range(start, stop, KEYS_AT_ONCE):
                keys = range(first, min(first + KEYS_AT_ONCE, stop))
                held = slice(before + keys.start - start, before + keys.stop - start)
                key = self.local.key[:, :, held].to(torch.bfloat16).float()
                yield keys, word + (first - start) // (WORD * self.config.block[1]), key
            word, before = word + words, before + stop - start

    def _rows_of(self, blocks: slice) -> slice:
        count = self.rows.shape[1]
        return slice(blocks.start * count, blocks.stop * count)


def _gathered_rows(
    local: Inputs, rows: Shares, share: Share, sight: Visibility, config: SparseConfig, team: Team
) -> Probe:
    batch, heads, _, dim = local.query.shape
    standing = [_positions(run, run[0], config) for of_rank in rows for run in of_rank]
    counts = [_block_count(of_rank, config) * config.probe_rows for of_rank in rows]
    own, before = [torch.zeros(0, dtype=torch.int64)], 0
    for start, stop in rows[team.rank]:
        own.append(_positions((start, stop), before, config).flatten())
        before += stop - start
    mine = local.query[:, :, torch.cat(own).to(local.query.device)].to(torch.bfloat16)
    arrived = team.gather([mine], [[(batch, heads, count, dim)] for count in counts], PROBE)
    query = torch.cat([parts[0] for parts in arrived], 2)
    return Probe(query, torch.cat(standing), local, share, sight, config)


def _positions(run: Interval, first: int, config: SparseConfig) -> Tensor:
    """The sampled rows of a run of whole blocks that begins at `first`; only the last of the sequence ends early."""
    return first + probe_positions(run[1] - run[0], config.block[0], config.probe_rows, torch.device("cpu"))


def _block_count(share: Share, config: SparseConfig) -> int:
    return sum(-(-(stop - start) // config.block[0]) for start, stop in share)


def _words_of_runs(share: Share, config: SparseConfig) -> list[int]:
    """How many words the blocks of each run of keys take."""
    return [-(-(stop - start) // (WORD * config.block[1])) for start, stop in share]


def _over_all_keys(lse: Tensor, rows: Shares, config: SparseConfig, team: Team) -> Tensor:
    """float32 [B, Hq, R]: put together by the owners of the rows, so that what moves does not grow with the ring."""
    counts = [_block_count(of_rank, config) * config.probe_rows for of_rank in rows]
    shapes = [[(*lse.shape[:2], count)] for count in counts]
    parts = team.exchange([[part] for part in lse.split(counts, 2)], [shapes[team.rank]] * team.size, PROBE)
    mine = torch.stack([part for (part,) in parts]).logsumexp(0)
    return torch.cat([part for (part,) in team.gather([mine], shapes, PROBE)], 2)


def _brought_home(bits: Tensor, rows: Shares, keys: Shares, k_len: int, config: SparseConfig, team: Team) -> Tensor:
    """What all ranks found for this rank's rows, each run of keys put in its place among all of them."""
    counts = [_block_count(of_rank, config) for of_rank in rows]
    words = [_words_of_runs(of_rank, config) for of_rank in keys]
    shapes = [[(*bits.shape[:2], counts[team.rank], sum(of_rank))] for of_rank in words]
    arrived = team.exchange([[part] for part in bits.split(counts, 2)], shapes, PROBE)
    total = -(-k_len // (WORD * config.block[1]))
    whole = bits.new_zeros(*bits.shape[:2], counts[team.rank], total)
    for (part,), share, lengths in zip(arrived, keys, words, strict=True):
        for (start, _), run in zip(share, part.split(lengths, 3), strict=True):
            or_into(whole, run, start // config.block[1])
    return whole
