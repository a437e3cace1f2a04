"""Ulysses: ranks that hold all heads of some tokens come to hold some heads of all their tokens, and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparge.config import SparseConfig
from sparge.distributed.sharding import Holding, Move, Shares, even_split, redistribute, union
from sparge.distributed.wire import FROM_HEADS, TO_HEADS, Team
from sparge.inputs import Inputs

PER_HEAD = ("threshold", "gap", "cdf", "topk", "probe", "similarity", "pv_threshold")

Heads = tuple[int, ...]


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank computes. Key heads go to every rank that has a query head of theirs."""

    query: tuple[Heads, ...]
    key: tuple[Heads, ...]
    rank: int

    @classmethod
    def of(cls, inputs: Inputs, team: Team) -> HeadSplit:
        heads = inputs.query.shape[1]
        if heads < team.size:
            raise ValueError(
                f"query has {heads} heads, fewer than the {team.size} ranks of the mesh's Ulysses dimension: "
                "make that one smaller and its ring larger."
            )
        query = tuple(tuple(range(*interval)) for interval in even_split(heads, team.size))
        return cls(query, tuple(_key_heads(own, inputs.group_size) for own in query), team.rank)

    @property
    def mine(self) -> Heads:
        return self.query[self.rank]

    def config_for(self, config: SparseConfig) -> SparseConfig:
        """Per-head settings cut to this rank's heads."""
        given = {name: getattr(config, name) for name in PER_HEAD}
        mine: dict[str, Any] = {
            name: tuple(values[head] for head in self.mine)
            for name, values in given.items()
            if isinstance(values, tuple)
        }
        return replace(config, **mine)


def _key_heads(query_heads: Heads, group: int) -> Heads:
    """Each once, if all serve equally many of these query heads; else one for every query head."""
    each = [head // group for head in query_heads]
    return tuple(sorted(set(each))) if len(set(Counter(each).values())) == 1 else tuple(each)


def to_heads(inputs: Inputs, rows: Shares, keys: Shares, split: HeadSplit, team: Team) -> Inputs:
    """All tokens of this rank's heads, ascending; `rows` and `keys` are those that each rank of the team holds."""
    sources = ((inputs.query, rows, split.query), (inputs.key, keys, split.key), (inputs.value, keys, split.key))
    moves = []
    for x, shares, wanted in sources:
        have = tuple(Holding(tuple(range(x.shape[1])), share) for share in shares)
        moves.append(Move(x, have, tuple(Holding(heads, union(shares)) for heads in wanted)))
    query, key, value = redistribute(moves, team, TO_HEADS)
    return replace(inputs, query=query, key=key, value=value)


def from_heads(sources: list[Tensor], rows: Shares, split: HeadSplit, team: Team) -> list[Tensor]:
    """All heads of this rank's rows, of tensors [B, heads, rows, D]."""
    have = tuple(Holding(heads, union(rows)) for heads in split.query)
    everything = tuple(head for heads in split.query for head in heads)
    want = tuple(Holding(everything, share) for share in rows)
    return redistribute([Move(x, have, want) for x in sources], team, FROM_HEADS)
