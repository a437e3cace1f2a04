"""Which tokens each rank holds, and how they move when other ranks need them. Nothing here touches the network
but `redistribute`, and everything is worked out from lengths that every rank knows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparge.distributed.wire import Shape, Team

SHARDINGS = ("contiguous", "zigzag")

Interval = tuple[int, int]  # of tokens: start, stop
Share = tuple[Interval, ...]  # the tokens of one rank, ascending, in the order in which it holds them
Shares = tuple[Share, ...]  # one per rank


def even_split(total: int, parts: int) -> list[Interval]:
    """As torch.tensor_split: the first ones are longer by one where it does not divide.

    >>> even_split(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    sizes = [total // parts + (n < total % parts) for n in range(parts)]
    return list(pairwise(accumulate(sizes, initial=0)))


def split_evenly(total: int, ranks: int, sharding: str) -> Shares:
    """How `shard_sequence` cuts a sequence. Zigzag: of twice as many chunks, rank n has the n-th from either end.

    >>> split_evenly(16, 2, "zigzag")
    (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    """
    if sharding == "contiguous":
        return tuple((interval,) for interval in even_split(total, ranks))
    chunks = even_split(total, 2 * ranks)
    return tuple((chunks[n], chunks[-1 - n]) for n in range(ranks))


@functools.lru_cache(maxsize=256)
def shares_of(lengths: tuple[tuple[int, ...], ...], sharding: str) -> Shares:
    """Who holds which tokens; lengths[rank] are those of its segments, each cut over all ranks by itself."""
    shares: list[list[Interval]] = [[] for _ in lengths]
    begin = 0
    for of_segment in zip(*lengths, strict=True):
        for share, part in zip(shares, _shares_of_segment(of_segment, sharding), strict=True):
            share += [(begin + start, begin + stop) for start, stop in part]
        begin += sum(of_segment)
    return tuple(coalesced(share) for share in shares)


def _shares_of_segment(lengths: tuple[int, ...], sharding: str) -> Shares:
    if sharding == "contiguous":
        return tuple((interval,) for interval in pairwise(accumulate(lengths, initial=0)))
    shares = split_evenly(sum(lengths), len(lengths), sharding)
    want = [length_of(share) for share in shares]
    if want != list(lengths):
        raise ValueError(
            f"zigzag shards of {sum(lengths)} tokens over {len(lengths)} ranks have {want} tokens, not "
            f"{list(lengths)}: cut them with sparge.shard_sequence, or use sharding='contiguous'."
        )
    return shares


def length_of(share: Share) -> int:
    return sum(stop - start for start, stop in share)


def coalesced(intervals: Sequence[Interval]) -> Share:
    """Ascending, neighbours joined, empty ones left out."""
    joined: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(shares: Sequence[Share]) -> Share:
    return coalesced([interval for share in shares for interval in share])


def within(share: Share, start: int, stop: int) -> Share:
    """The part of a share inside an interval, counted from its start."""
    cut = [(max(a, start) - start, min(b, stop) - start) for a, b in share]
    return tuple((a, b) for a, b in cut if a < b)


@functools.lru_cache(maxsize=256)
def aligned(shares: Shares, unit: int) -> Shares:
    """Whole units only: one that several ranks hold parts of goes to the rank that holds most of it."""
    best: dict[int, tuple[int, int]] = {}
    for rank, share in enumerate(shares):
        held: dict[int, int] = {}
        for start, stop in share:
            for n in range(start // unit, -(-stop // unit)):
                held[n] = held.get(n, 0) + min(stop, (n + 1) * unit) - max(start, n * unit)
        for n, tokens in held.items():
            best[n] = max(best.get(n, (0, 0)), (tokens, -rank))
    total = sum(map(length_of, shares))
    owned: list[list[Interval]] = [[] for _ in shares]
    for n, (_, negative_rank) in best.items():
        owned[-negative_rank].append((n * unit, min((n + 1) * unit, total)))
    return tuple(map(coalesced, owned))


def units_of(share: Share, unit: int) -> list[int]:
    """The whole units of an aligned share, in its order."""
    return [n for start, stop in share for n in range(start // unit, -(-stop // unit))]


def joined(parts: Sequence[Tensor], shares: Shares, dim: int, unit: int = 1) -> Tensor:
    """The ranks' parts in the order of the sequence; `dim` counts units of tokens."""
    pieces = []
    for part, share in zip(parts, shares, strict=True):
        sizes = [-(-stop // unit) - start // unit for start, stop in share]
        pieces += list(zip(share, part.split(sizes, dim), strict=True))
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


@dataclass(frozen=True)
class Holding:
    """What one rank has, or shall have, of a tensor [B, heads, tokens, D]. A head may be wanted several times."""

    heads: tuple[int, ...]
    tokens: Share


@dataclass(frozen=True)
class Move:
    """A tensor, who has which part of it, and who shall."""

    tensor: Tensor
    have: tuple[Holding, ...]
    want: tuple[Holding, ...]


def redistribute(moves: Sequence[Move], team: Team, purpose: str) -> list[Tensor]:
    """The tensors with the parts that this rank wants, in one exchange; none if everybody has what it wants."""
    if all(move.have == move.want for move in moves):
        return [move.tensor for move in moves]
    outgoing = [[_taken(move, team.rank, target) for move in moves] for target in range(team.size)]
    shapes = [[_shape(move, source, team.rank) for move in moves] for source in range(team.size)]
    arrived = team.exchange(outgoing, shapes, purpose)
    return [_placed(move, [parts[n] for parts in arrived], team.rank) for n, move in enumerate(moves)]


def overlaps(held: Share, wanted: Share) -> list[tuple[int, int, int]]:
    """Runs of tokens in both: where among those held, where among those wanted, how many."""
    runs, before = [], 0
    for start, stop in held:
        ahead = 0
        for low, high in wanted:
            first, last = max(start, low), min(stop, high)
            if first < last:
                runs.append((before + first - start, ahead + first - low, last - first))
            ahead += high - low
        before += stop - start
    return runs


def _common_heads(have: Holding, want: Holding) -> tuple[list[int], list[int]]:
    """Where the heads that one has and the other wants stand, in either."""
    place = {head: n for n, head in enumerate(have.heads)}
    there = [n for n, head in enumerate(want.heads) if head in place]
    return [place[want.heads[n]] for n in there], there


def _run(places: list[int]) -> slice | None:
    """Neighbours as a slice, which copies nothing."""
    if not places or places != list(range(places[0], places[0] + len(places))):
        return None
    return slice(places[0], places[0] + len(places))


def _taken(move: Move, source: int, target: int) -> Tensor:
    have, want = move.have[source], move.want[target]
    places = _common_heads(have, want)[0]
    heads = move.tensor[:, _run(places) or places]
    runs = [heads[:, :, at : at + length] for at, _, length in overlaps(have.tokens, want.tokens)]
    return runs[0] if len(runs) == 1 else torch.cat([heads[:, :, :0], *runs], 2)


def _shape(move: Move, source: int, target: int) -> Shape:
    have, want = move.have[source], move.want[target]
    tokens = sum(length for _, _, length in overlaps(have.tokens, want.tokens))
    return (move.tensor.shape[0], len(_common_heads(have, want)[1]), tokens, move.tensor.shape[3])


def _placed(move: Move, parts: Sequence[Tensor], rank: int) -> Tensor:
    want, like = move.want[rank], move.tensor
    whole = like.new_empty(like.shape[0], len(want.heads), length_of(want.tokens), like.shape[3])
    for have, part in zip(move.have, parts, strict=True):
        places, before = _common_heads(have, want)[1], 0
        heads = _run(places) or places
        for _, at, length in overlaps(have.tokens, want.tokens):
            whole[:, heads, at : at + length] = part[:, :, before : before + length]
            before += length
    return whole
