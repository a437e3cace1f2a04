"""Ring attention over block-aligned shards: one mask for the whole sequence, keys and values only to who needs them.

1. A sample of all keys and values gives every rank the same smoothing and scales.
2. Every rank summarizes its own tokens; the summaries of keys, a few numbers per block, are gathered.
3. Each rank selects the blocks of its rows among all keys, and says which units of keys it needs. What the "probe" rule
   asks of rows, all ranks find out together.
4. While one rank's units are attended to, those of the next are on their way; results are merged by their LSE.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge import quantization as fmt
from sparge.backends import Backend, Choice, choose
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.distributed.cargo import UNIT, Cargo, fresh, loaded, without_keys
from sparge.distributed.probe import probe_in_ring
from sparge.distributed.sharding import Interval, Shares, joined, length_of, units_of
from sparge.distributed.wire import KEYS_AND_VALUES, NEEDS, SAMPLE, SUMMARIES, Team, Transfer
from sparge.inputs import Inputs, Sample
from sparge.merging import merge
from sparge.quantization import Quantized
from sparge.stages import Blocks, Output
from sparge.visibility import Visibility


@dataclass(frozen=True)
class RingResult:
    """This rank's rows, and its share of the counts."""

    output: Output
    executed: Tensor  # int64 [B, Hq]
    visible: Tensor
    choice: Choice


def attend_ring(
    local: Inputs, rows: Shares, keys: Shares, sight: Visibility, config: SparseConfig, team: Team, count: bool
) -> RingResult:
    """`local` holds rows[team.rank] and keys[team.rank], aligned to blocks; `sight` is that of the whole sequence."""
    mine = rows[team.rank]
    local = _with_something(replace(local, layout="BHSD", needs_lse=True), sight, keys[team.rank])
    choice = choose(local, config)
    backend, config = choice.backend, choice.config
    local = replace(local, sample=_gathered_sample(local, keys, sight, config, team))
    blocks = backend.summarize(local, config)
    summaries = _gathered_summaries(blocks, keys, team)
    probed: list[Tensor | None] = [None] * len(mine)
    if "probe" in config.rule and not config.keeps_everything:
        probed = list(probe_in_ring(blocks, rows, keys, sight, config, team))

    starts = [length_of(mine[:n]) for n in range(len(mine))]
    spans = [Span(summaries, *place, sight, backend, config) for place in zip(probed, mine, starts, strict=True)]
    needs = _gathered_needs(spans, sight.k_len, team)
    for cargo in _arrivals(Cargo.of(blocks, keys[team.rank]), keys, needs, team):
        for interval, tensors in cargo.pieces():
            for span in spans:
                span.attend(interval, tensors)
    return RingResult(_output(spans, local), *_counts(spans, local, count), choice)


def _with_something(local: Inputs, sight: Visibility, share: tuple[Interval, ...]) -> Inputs:
    """A rank without rows or keys gets one of zeros, so that it knows what those of others look like."""
    query, key, value = (
        x if x.shape[2] else x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (local.query, local.key, local.value)
    )
    valid = sight.key_valid
    if valid is not None:
        valid = torch.cat([valid[:, start:stop] for start, stop in share] or [valid[:, :1]], 1)
    own = Visibility(query.shape[2], key.shape[2], sight.device, key_valid=valid)
    return replace(local, query=query, key=key, value=value, visibility=own)


# ---- 1. the sample


@functools.lru_cache(maxsize=256)
def sampled_tiles(keys: Shares) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For each rank its sampled tiles: which of all, where among its tokens, how many tokens."""
    tiles = -(-sum(map(length_of, keys)) // fmt.SAMPLE_TILE)
    stride = max(tiles // fmt.SAMPLED_TILES, 1)
    found: list[tuple[tuple[int, int, int], ...]] = []
    for share in keys:
        own, before = [], 0
        for start, stop in share:
            for tile in range(start // fmt.SAMPLE_TILE, -(-stop // fmt.SAMPLE_TILE)):
                if tile % stride == 0:
                    first = tile * fmt.SAMPLE_TILE
                    own.append((tile, before + first - start, min(fmt.SAMPLE_TILE, stop - first)))
            before += stop - start
        found.append(tuple(own))
    return tuple(found)


def _gathered_sample(local: Inputs, keys: Shares, sight: Visibility, config: SparseConfig, team: Team) -> Sample:
    """What `quantization.sampled` would take of the whole sequence, in its order."""
    plan, eight_bit = sampled_tiles(keys), config.quantization == "int8-fp8"
    sources = [local.key, local.value] if eight_bit else [local.key]

    def tiles_of(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :0], *(x[:, :, at : at + length] for _, at, length in plan[team.rank])], 2)

    lengths = [sum(length for _, _, length in own) for own in plan]
    shapes = [[(*x.shape[:2], length, x.shape[3]) for x in sources] for length in lengths]
    message = [tiles_of(x) for x in sources]
    if eight_bit:
        valid = local.visibility.key_valid
        value = local.value if valid is None else torch.where(valid[:, None, :, None], local.value, 0.0)
        message.append(fmt.value_max(value))
        shapes = [[*of_rank, tuple(message[-1].shape)] for of_rank in shapes]
    arrived = team.gather(message, shapes, SAMPLE)

    order = sorted((tile, rank, at) for rank, own in enumerate(plan) for at, (tile, _, _) in enumerate(own))
    pieces = [[parts[0].split([n for _, _, n in own], 2) for parts, own in zip(arrived, plan, strict=True)]]
    if eight_bit:
        pieces.append([parts[1].split([n for _, _, n in own], 2) for parts, own in zip(arrived, plan, strict=True)])
    key, *values = (torch.cat([of_rank[rank][at] for _, rank, at in order], 2) for of_rank in pieces)
    valid = None
    if sight.key_valid is not None:
        runs = [sight.key_valid[:, tile * fmt.SAMPLE_TILE :][:, : fmt.SAMPLE_TILE] for tile, _, _ in order]
        valid = torch.cat(runs, 1)
    if not values:
        return Sample(key, None, valid, None)
    return Sample(key, values[0], valid, torch.stack([parts[-1] for parts in arrived]).amax(0))


# ---- 2. the summaries


def _gathered_summaries(blocks: Blocks, keys: Shares, team: Team) -> Blocks:
    """This rank's rows and everybody's keys."""
    size = blocks.block[1]
    counts = [len(units_of(share, size)) for share in keys]
    own = counts[team.rank]
    k_means = blocks.k_means[:, :, :, :own].transpose(2, 3)  # blocks before sub-blocks, as in the others
    parts = [k_means, blocks.v_finite[:, :, :own]]
    if blocks.k_similarity is not None:
        parts.append(blocks.k_similarity[:, :, :own])
    shapes = [[(*x.shape[:2], n, *x.shape[3:]) for x in parts] for n in counts]
    arrived = team.gather(parts, shapes, SUMMARIES)
    means, finite, *similarity = (joined(of_all, keys, 2, size) for of_all in zip(*arrived, strict=True))
    return replace(
        blocks,
        k_means=means.transpose(2, 3).contiguous(),
        v_finite=finite,
        k_similarity=similarity[0] if similarity else None,
    )


# ---- 3. the masks


class Span:
    """A run of neighbouring query rows of this rank: its mask over all keys, and the attention computed so far."""

    def __init__(
        self,
        blocks: Blocks,
        probed: Tensor | None,
        rows: Interval,
        start: int,
        sight: Visibility,
        backend: Backend,
        config: SparseConfig,
    ) -> None:
        """`blocks` are of all of the rank's rows; `probed` is of these, which begin at `start` among those."""
        self.rows, self.sight = range(*rows), sight
        self.backend, self.config = backend, config
        stop = start + len(self.rows)
        self.own = _rows_of(blocks, start, stop)
        self.mask = self._select(probed)
        self.values: Tensor | None = None  # float32 [B, Hq, rows, Dv]
        self.lse: Tensor | None = None
        self.skipped: Tensor | None = None

    def _select(self, probed: Tensor | None) -> BlockMask:
        inputs, k_len = self.own.inputs, self.sight.k_len
        sight = self.sight.part(self.rows, range(k_len))
        inputs = replace(without_keys(inputs, k_len), visibility=sight)
        config = replace(self.config, protected=())  # which are positions in the whole sequence
        mask = self.backend.select(replace(self.own, inputs=inputs, probed=probed), config)
        return mask | self._protected(sight) if self.config.protected else mask

    def _protected(self, sight: Visibility) -> BlockMask:
        """Protected tokens are positions of the whole sequence; a row stands where the whole sequence has it."""
        (rows, keys), first = self.config.block, self.rows.start + self.sight.offset
        device = self.sight.device
        in_rows = torch.zeros(-(-len(self.rows) // rows), dtype=torch.bool, device=device)
        in_keys = torch.zeros(-(-self.sight.k_len // keys), dtype=torch.bool, device=device)
        for start, stop in self.config.protected_ranges(self.sight.k_len):
            if start < stop:
                in_keys[start // keys : -(-stop // keys)] = True
            top, bottom = max(0, start - first), min(len(self.rows), stop - first)
            if top < bottom:
                in_rows[top // rows : -(-bottom // rows)] = True
        kept = in_rows[:, None] | in_keys
        mask = BlockMask.from_dense(kept, len(self.rows), self.sight.k_len, self.config.block)
        return mask.cut_to(sight, self.own.inputs.query.shape[0])

    @functools.cached_property
    def needs(self) -> Tensor:
        """bool [units] on the host: which units of all keys some row needs."""
        columns, per_unit = self.mask.kept_columns, UNIT // self.config.block[1]
        padded = torch.nn.functional.pad(columns, (0, -len(columns) % per_unit))
        needs: Tensor = padded.unflatten(0, (-1, per_unit)).any(1).cpu()
        return needs

    # ---- 4. attention over one piece of keys after the other

    def attend(self, keys: Interval, cargo: list[Tensor]) -> None:
        if not self.needs[keys[0] // UNIT : -(-keys[1] // UNIT)].any():
            return
        size = self.config.block[1]
        first, last = keys[0] // size, -(-keys[1] // size)
        sight = self.sight.part(self.rows, range(*keys))
        inputs, quantized = loaded(self.own.inputs, self.own.quantized, cargo, keys[1] - keys[0])
        blocks = replace(
            self.own,
            inputs=replace(inputs, visibility=sight),
            v_finite=fresh(self.own.v_finite[:, :, first:last]),
            quantized=quantized,
        )
        self._merge(self.backend.attend(blocks, self.mask.of_keys(first, last, sight), self.config))

    def _merge(self, part: Output) -> None:
        assert part.lse is not None
        if self.values is None or self.lse is None or self.skipped is None:
            self.values, self.lse, self.skipped = part.values.float(), part.lse, part.skipped_pv
            return
        self.values, self.lse = merge(self.values, self.lse, part.values.float(), part.lse)
        self.skipped = self.skipped + part.skipped_pv


def _rows_of(blocks: Blocks, start: int, stop: int) -> Blocks:
    """The blocks of some rows."""
    if stop - start == blocks.inputs.query.shape[2]:
        return blocks
    first, last = start // blocks.block[0], -(-stop // blocks.block[0])
    quantized = blocks.quantized
    if quantized is not None:
        quantized = _quantized_rows(quantized, slice(start, stop))
    similarity = blocks.q_similarity
    return replace(
        blocks,
        inputs=replace(blocks.inputs, query=blocks.inputs.query[:, :, start:stop]),
        q_means=fresh(blocks.q_means[:, :, first:last]),
        q_similarity=None if similarity is None else fresh(similarity[:, :, first:last]),
        quantized=quantized,
    )


def _quantized_rows(quantized: Quantized, rows: slice) -> Quantized:
    term = quantized.lse_term
    return replace(
        quantized,
        query=fresh(quantized.query[:, :, rows]),
        query_scale=fresh(quantized.query_scale[:, :, rows]),
        lse_term=None if term is None else fresh(term[:, :, rows]),
    )


def _gathered_needs(spans: list[Span], k_len: int, team: Team) -> Tensor:
    """bool [ranks, units] on the host: which units of all keys each rank needs."""
    units = -(-k_len // UNIT)
    mine = torch.zeros(units, dtype=torch.bool)
    for span in spans:
        mine |= span.needs
    return torch.stack([parts[0].cpu() for parts in team.gather([mine], [[(units,)]] * team.size, NEEDS)])


def _arrivals(own: Cargo, keys: Shares, needs: Tensor, team: Team) -> Iterator[Cargo]:
    """This rank's keys and values, then those of the others, each fetched while the one before is used.

    Every rank sends straight to who needs its units, at step n to the n-th after it, and nothing to who needs none.
    """
    units, needed = [units_of(share, UNIT) for share in keys], needs.tolist()

    def wanted(target: int, source: int) -> list[int]:
        """Units that one rank needs of another, counted among the other's."""
        return [n for n, unit in enumerate(units[source]) if needed[target][unit]]

    def started(step: int) -> tuple[int, list[int], Transfer]:
        target, source = (team.rank + step) % team.size, (team.rank - step) % team.size
        leaving, coming = wanted(target, team.rank), wanted(team.rank, source)
        outgoing = own.taken(leaving) if leaving else None
        shapes = own.shapes(len(coming)) if coming else None
        return source, coming, team.start(outgoing, target, shapes, source, own.tensors, KEYS_AND_VALUES)

    following = started(1) if team.size > 1 else None
    yield own
    for step in range(1, team.size):
        assert following is not None
        source, coming, transfer = following
        arrived = transfer.wait()
        following = started(step + 1) if step + 1 < team.size else None
        if arrived is not None:
            yield own.of_other(arrived, coming, keys[source])


def _output(spans: list[Span], local: Inputs) -> Output:
    """The spans' rows one after the other; a row that needed no key gives 0, with an LSE of -inf."""
    batch, heads = local.query.shape[:2]
    values, lses = [], []
    skipped = torch.zeros(batch, heads, dtype=torch.int64, device=local.query.device)
    for span in spans:
        shape = (batch, heads, len(span.rows))
        if span.values is None or span.lse is None or span.skipped is None:
            values.append(local.query.new_zeros(*shape, local.value.shape[3]))
            lses.append(torch.full(shape, -torch.inf, dtype=torch.float32, device=local.query.device))
        else:
            values.append(span.values.to(local.query.dtype))
            lses.append(span.lse)
            skipped = skipped + span.skipped
    if not spans:
        empty = local.query.new_zeros(batch, heads, 0, local.value.shape[3])
        return Output(empty, empty[..., 0].float(), skipped)
    return Output(torch.cat(values, 2), torch.cat(lses, 2), skipped)


def _counts(spans: list[Span], local: Inputs, count: bool) -> tuple[Tensor, Tensor]:
    """Blocks computed and visible, int64 [B, Hq]; zeros where nobody asks."""
    heads = local.query.shape[:2]
    executed = torch.zeros(heads, dtype=torch.int64, device=local.query.device)
    visible = executed.clone()
    for span in spans if count else []:
        executed += span.mask.kept_per_head
        visible += span.mask.visible_per_head
    return executed, visible
