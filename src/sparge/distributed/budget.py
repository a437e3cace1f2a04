"""The error budget of a ring: the sampled rows travel to the keys, and heads over the budget take a second round.

Every rank computes the sampled rows of all over its own keys, which it has unquantised; their owners merge the parts by
their LSE. All ranks then see the same errors, so that they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.backends import choose
from sparge.budget import SLOW, loses_nothing
from sparge.config import SparseConfig
from sparge.distributed.ring import RingResult, attend_ring
from sparge.distributed.sharding import Share, Shares
from sparge.distributed.wire import BUDGET, Team
from sparge.exact import Part, attend_keys
from sparge.inputs import Inputs
from sparge.judging import Verdict, error_of_rows, row_errors, sampled_rows
from sparge.merging import merge
from sparge.visibility import Visibility


@dataclass(frozen=True)
class Held:
    """The sampled rows of one rank: where they stand in the whole sequence, and among the rank's own rows."""

    whole: list[int]
    local: list[int]


def enforce_in_ring(
    result: RingResult, local: Inputs, rows: Shares, keys: Shares, sight: Visibility, team: Team
) -> tuple[RingResult, Verdict]:
    """The result with every head over the budget computed anew; and what is estimated of it, alike on every rank."""
    config, output, heads = result.choice.config, result.output, local.query.shape[:2]
    assert config.max_error is not None
    if loses_nothing(config):
        nothing = torch.zeros(heads, device=local.query.device)
        return result, Verdict(nothing, nothing.bool())
    sample = sampled_rows(sight.q_len, torch.device("cpu")).tolist()
    sampled = [_held(share, sample) for share in rows]
    exact, mine = _exact_rows(local, keys[team.rank], sampled, sight, team), sampled[team.rank].local
    error, bound = _error_of_all(output.values[:, :, mine], exact, sampled, sight.q_len, team)
    over = ~(bound <= config.max_error)  # NaN is over
    if not over.any():
        return result, Verdict(error, over)
    values, lse = _second_round(over, result, local, rows, keys, sight, team)
    after, _ = _error_of_all(values[:, :, mine], exact, sampled, sight.q_len, team)
    output = replace(output, values=values, lse=lse, skipped_pv=torch.where(over, 0, output.skipped_pv))
    executed = torch.where(over, result.visible, result.executed)
    return replace(result, output=output, executed=executed), Verdict(after, over)


def _held(share: Share, sample: list[int]) -> Held:
    found, before = [], 0
    for start, stop in share:
        found += [(row, before + row - start) for row in sample if start <= row < stop]
        before += stop - start
    return Held([row for row, _ in found], [place for _, place in found])


def _exact_rows(local: Inputs, share: Share, sampled: list[Held], sight: Visibility, team: Team) -> Tensor:
    """Dense attention of this rank's sampled rows over the keys of all ranks, [B, Hq, R, Dv] in the inputs' dtype."""
    batch, heads, _, dim = local.query.shape
    counts = [len(held.whole) for held in sampled]
    mine = local.query[:, :, sampled[team.rank].local]
    arrived = team.gather([mine], [[(batch, heads, n, dim)] for n in counts], BUDGET)
    query = torch.cat([parts[0] for parts in arrived], 2)
    rows = torch.tensor([row for held in sampled for row in held.whole], device=query.device)
    values, lse = _over_own_keys(query, rows, local, share, sight)
    outgoing = [list(parts) for parts in zip(values.split(counts, 2), lse.split(counts, 2), strict=True)]
    own = [(batch, heads, counts[team.rank], values.shape[3]), (batch, heads, counts[team.rank])]
    first, *others = team.exchange(outgoing, [own] * team.size, BUDGET)
    found: Part = (first[0], first[1])
    for more_values, more_lse in others:
        found = merge(*found, more_values, more_lse)
    return found[0].to(query.dtype)


def _over_own_keys(query: Tensor, rows: Tensor, local: Inputs, share: Share, sight: Visibility) -> Part:
    values = query.new_zeros(*query.shape[:3], local.value.shape[3], dtype=torch.float32)
    found: Part = (values, torch.full_like(values[..., 0], -torch.inf))
    before = 0
    for start, stop in share:
        held = slice(before, before + stop - start)
        part = attend_keys(
            query, local.key[:, :, held], local.value[:, :, held], local.scale, sight, rows, range(start, stop)
        )
        found, before = merge(*found, *part), held.stop
    return found


def _error_of_all(values: Tensor, exact: Tensor, sampled: list[Held], length: int, team: Team) -> tuple[Tensor, Tensor]:
    """As `estimated_error`, of the sampled rows of all ranks."""
    message = row_errors(values, exact)
    shapes = [[(*values.shape[:2], len(held.whole))] * 2 for held in sampled]
    arrived = team.gather(message, shapes, BUDGET)
    size, off = (torch.cat(of_all, 2) for of_all in zip(*arrived, strict=True))
    return error_of_rows(size, off, length)


def _second_round(
    over: Tensor, result: RingResult, local: Inputs, rows: Shares, keys: Shares, sight: Visibility, team: Team
) -> Part:
    """Values and LSE of this rank's rows, those heads anew; key heads that none of them reads stay at home."""
    config, group, output = result.choice.config, local.group_size, result.output
    key_heads = over.any(0).unflatten(0, (-1, group)).any(1).nonzero()[:, 0]
    heads = (key_heads[:, None] * group + torch.arange(group, device=over.device)).flatten()
    some = replace(local, query=local.query[:, heads], key=local.key[:, key_heads], value=local.value[:, key_heads])
    everything = SparseConfig(rule="topk", topk=1.0, block=config.block, quantization="none")
    able = choose(some, everything).backend
    if able is not result.choice.backend and able.name in SLOW:
        everything = replace(everything, quantization=config.quantization)
    again = attend_ring(some, rows, keys, sight, everything, team, count=False).output
    assert again.lse is not None
    assert output.lse is not None
    values, lse, anew = output.values.clone(), output.lse.clone(), over[:, heads, None]
    values[:, heads] = torch.where(anew[..., None], again.values, values[:, heads])
    lse[:, heads] = torch.where(anew, again.lse, lse[:, heads])
    return values, lse
