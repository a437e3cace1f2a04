"""spend="prediction": how strict each group of layers may be, judged by what that does to the model's own output.

Errors of heads say little about what a model makes of them. Here a group of layers is made sparse alone, step by step,
and the model's output is compared with the dense one's. Small changes from different places add up, so one budget can
be spent where it saves most blocks; what was chosen is then measured as a whole, and chosen again if that is too much.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparge.inputs import prepare_inputs, restore
from sparge.profile import LayerProfile, Profile, check_name
from sparge.tuning.choose import within_budget
from sparge.tuning.job import Search, versions
from sparge.tuning.journal import JournalError
from sparge.tuning.ladder import EVERYTHING, settings_at, with_settings
from sparge.tuning.measure import exact_output, sample_blocks, sparse_output
from sparge.tuning.subjects import differentiable_attention

RUNGS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)  # strictness, beside keeping everything, which needs no measuring
MOST_GROUPS = 10  # without being told otherwise
CORRECTIONS = 3
NEGLIGIBLE = 0.01  # of the budget

Strictness = Mapping[str, float]  # by layer; the others are exact


@dataclass(frozen=True)
class Outcome:
    """Some layers sparse: how far the output moved, and blocks of every layer, over all inputs."""

    divergence: float
    executed: Mapping[str, float]
    visible: Mapping[str, float]

    def work(self, layers: Iterable[str]) -> float:
        return sum(self.executed[name] for name in layers)


def steps_of(layers: int, groups: int | None) -> int:
    """How often an input goes through the model, at most."""
    return 4 + (1 + len(RUNGS)) * min(groups or MOST_GROUPS, layers) + 1 + CORRECTIONS


def search_by_prediction(search: Search, budget: float | None, groups: int | None) -> Profile:
    """The fewest blocks that move the output by no more than `budget`; None: than the config as it was given."""
    dense = _dense_outputs(search)
    try_ = _tryer(search, dense)
    layers = list(dense.heads)
    as_given = dict.fromkeys(layers, 0.0)
    given = try_("as given", as_given)
    everything = dict.fromkeys(layers, EVERYTHING)
    rounding = try_("everything kept", everything)
    allowed = given.divergence if budget is None else budget
    parts = _split(layers, min(groups or MOST_GROUPS, len(layers)))
    curves = _curves(parts, given, rounding.divergence > NEGLIGIBLE * allowed, try_)
    found = [(as_given, given), *_tried_as_a_whole(parts, *curves, allowed, rounding.divergence, try_)]
    good = [(strictness, outcome) for strictness, outcome in found if outcome.divergence <= allowed]
    strictness, outcome = min(good or [(everything, rounding)], key=lambda one: one[1].work(layers))
    return _profile(search, dense.heads, strictness, allowed, outcome)


Try = Callable[[str, Strictness], Outcome]


def _curves(parts: Sequence[Sequence[str]], given: Outcome, rounds: bool, try_: Try) -> tuple[Tensor, Tensor]:
    """Blocks and divergence [rungs, parts], each part sparse alone; the first rung keeps everything.

    Divergence is what comes on top of rounding (`rounds`: which must be measured): in 16 bits one part alone may round
    as differently as all do together, in 8 bits it adds up.
    """
    work, damage = [], []
    for part in parts:
        stage = f"{part[0]} to {part[-1]}"
        tried = [try_(stage, dict.fromkeys(part, rung)) for rung in RUNGS]
        rounding = try_(stage, dict.fromkeys(part, EVERYTHING)).divergence if rounds else 0.0
        work.append([sum(given.visible[name] for name in part), *(one.work(part) for one in tried)])
        damage.append([0.0, *(max(0.0, one.divergence - rounding) for one in tried)])
    return torch.tensor(work, dtype=torch.float64).T, torch.tensor(damage, dtype=torch.float64).T


def _tried_as_a_whole(
    parts: Sequence[Sequence[str]], work: Tensor, damage: Tensor, allowed: float, rounding: float, try_: Try
) -> Iterator[tuple[Strictness, Outcome]]:
    """What the curves promise to be within the budget, all parts sparse together; corrected by what that did."""
    budget, before = max(0.0, allowed - rounding), None
    for _ in range(1 + CORRECTIONS):
        picked = within_budget(work, damage, budget).tolist()
        if picked == before:
            return
        before = picked
        steps = [(EVERYTHING, *RUNGS)[index] for index in picked]
        strictness = {name: step for part, step in zip(parts, steps, strict=True) for name in part}
        outcome = try_("together", strictness)
        yield strictness, outcome
        if outcome.divergence <= rounding or allowed <= rounding:
            return
        budget *= (allowed - rounding) / (outcome.divergence - rounding)


def _split(layers: list[str], count: int) -> list[list[str]]:
    """Neighbours together, in parts of nearly equal size."""
    edges = [round(n * len(layers) / count) for n in range(count + 1)]
    return [layers[start:stop] for start, stop in pairwise(edges)]


# ---- running the model


@dataclass(frozen=True)
class Dense:
    outputs: list[Tensor]  # one per input
    heads: dict[str, int]  # layers in the order of their first call


def _dense_outputs(search: Search) -> Dense:
    heads: dict[str, int] = {}

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        check_name(layer)  # now, not when the profile is made
        heads[layer] = query.shape[2 if arguments.get("layout") == "BSHD" else 1]
        return differentiable_attention(query, key, value, **arguments)

    outputs = []
    for item in search.inputs:
        with torch.no_grad():
            outputs.append(search.subject.predict(item, attend))
        search.on_step("dense", "")
    if not heads:
        raise ValueError("the model computed no attention by `attend`: there is nothing to tune.")
    return Dense(outputs, heads)


def _tryer(search: Search, dense: Dense) -> Try:
    def try_(stage: str, strictness: Strictness) -> Outcome:
        divergence, executed, visible = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
        for index, item in enumerate(search.inputs):
            key = f"prediction/{index}/{hashlib.sha256(json.dumps(dict(strictness)).encode()).hexdigest()[:16]}"
            if key not in search.journal.records:
                search.journal.add(key, _moved(search, index, item, dense.outputs[index], strictness))
            one, counts = _checked_record(search.journal.records[key], key)
            divergence += one / len(search.inputs)
            for layer, (done, seen) in counts.items():
                executed[layer] += done
                visible[layer] += seen
            search.on_step(stage, "")
        return Outcome(divergence, executed, visible)

    return try_


def _moved(search: Search, index: int, item: Any, dense: Tensor, strictness: Strictness) -> list[Any]:
    """How far one input's output moves, and blocks executed and visible by layer."""
    counts = defaultdict[str, list[float]](lambda: [0.0, 0.0])

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        if layer not in strictness:
            return differentiable_attention(query, key, value, **arguments)
        with torch.autocast(query.device.type, enabled=False):
            inputs = prepare_inputs(query, key, value, **arguments)
            step = torch.full((inputs.query.shape[1],), strictness[layer], dtype=torch.float64)
            values, mask = sparse_output(inputs, with_settings(search.base, settings_at(search.base, step)))
        for n, blocks in enumerate((mask.kept_per_head, mask.visible_per_head)):
            counts[layer][n] += float(blocks.expand(inputs.query.shape[:2]).sum())
        return restore(values, inputs.layout)

    with torch.no_grad():
        other = search.subject.predict(item, attend)
        rows = sample_blocks(_as_rows(dense).shape[0], search.share, search.seed + index).to(dense.device)
        moved = search.subject.divergence(_as_rows(dense)[rows], _as_rows(other)[rows])
    if not math.isfinite(moved):
        raise ValueError("the model's output is not finite: not tuned.")
    return [moved, dict(counts)]


def _as_rows(output: Tensor) -> Tensor:
    return output.reshape(-1, output.shape[-1] if output.dim() else 1)


def _checked_record(value: Any, where: str) -> tuple[float, dict[str, list[float]]]:
    """A journal is a file like any other."""
    try:
        moved, counts = float(value[0]), {str(name): [float(n) for n in pair] for name, pair in value[1].items()}
        good = moved >= 0 and all(len(pair) == 2 and 0 <= pair[0] <= pair[1] for pair in counts.values())
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        good = False
    if not good:
        raise JournalError(f"the journal's record of {where} is damaged; delete the journal or name another.")
    return moved, counts


# ---- the result


def _profile(search: Search, heads: dict[str, int], chosen: Strictness, allowed: float, found: Outcome) -> Profile:
    """With shares and errors per head, from one more run of each input."""
    sums = _errors(search, heads, chosen)
    made = {}
    for name, count in heads.items():
        settings = settings_at(search.base, torch.full((count,), chosen[name], dtype=torch.float64))
        executed, visible, off, size = sums[name]
        tiny = torch.finfo(torch.float64).tiny
        made[name] = LayerProfile(
            settings, tuple((executed / visible.clamp(min=1)).tolist()), tuple((off / size.clamp(min=tiny)).tolist())
        )
    executed, visible = (sum(float(one[n].sum()) for one in sums.values()) for n in (0, 1))
    metrics = {
        "divergence": found.divergence, "allowed": allowed, "executed": executed / max(1.0, visible),
        "inputs": float(len(search.inputs)), "share": search.share,
    }  # fmt: skip
    return Profile(search.subject.name, search.base, made, metrics, versions())


def _errors(search: Search, heads: dict[str, int], chosen: Strictness) -> dict[str, Tensor]:
    """float64 [4, heads] per layer: blocks executed and visible, the sizes of error and exact output."""
    sums = {name: torch.zeros(4, count, dtype=torch.float64) for name, count in heads.items()}

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            inputs = prepare_inputs(query, key, value, **arguments)
            step = torch.full((heads[layer],), chosen[layer], dtype=torch.float64)
            exact = exact_output(inputs)
            values, mask = sparse_output(inputs, with_settings(search.base, settings_at(search.base, step)))
        blocks = [x.expand(inputs.query.shape[:2]).sum(0) for x in (mask.kept_per_head, mask.visible_per_head)]
        sizes = [x.double().abs().sum((0, 2, 3)) for x in (values - exact, exact)]
        sums[layer] += torch.stack([x.double().cpu() for x in (*blocks, *sizes)])
        search.on_step("errors", layer)
        return restore(exact, inputs.layout)

    for item in search.inputs:
        with torch.no_grad():
            search.subject.run(item, attend)
    return sums
