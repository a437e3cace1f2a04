"""spend="prediction": how strict each head may be, judged by what that does to the model's own output.

How far a head's output is off says little; where the model looks at it says more. A few gradients of what the model
predicts tell, for each head and every setting tried, how far its errors alone would move the prediction. Small changes
from different heads add up, so one budget is spent where it saves most blocks. Where inputs say what is to be
predicted, a head's errors may bring the prediction nearer to that, and such are preferred. What was chosen is then run
as a whole, and chosen again if it moves the output too far.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparge.inputs import prepare_inputs, restore
from sparge.profile import Profile
from sparge.tuning.choose import within_budget
from sparge.tuning.gradients import Gradients, drawn_gradients, draws_on
from sparge.tuning.job import Search, versions
from sparge.tuning.journal import JournalError
from sparge.tuning.ladder import Settings, grid, with_settings
from sparge.tuning.measure import Measurement, sample_blocks, sparse_output
from sparge.tuning.subjects import exact_attention
from sparge.tuning.survey import Layer, share_executed, survey

AS_GIVEN, EVERYTHING_KEPT = 0, 1  # in the grid
HELD_BACK = 0.9  # what gradients may promise of the budget: settings do better on the inputs they were chosen by
CORRECTED = 0.97  # what a correction aims at of what is allowed
DISTRUST = 3.0  # draws of an input that count as much as how large gradients and errors are
LOSS_WEIGHT = 0.2  # of changes of the loss against divergence, heads as given: more would choose more blocks
NOTHING = 1e-6  # of what the config loses: rounding that need not be measured
CORRECTIONS = 3
TINY = torch.finfo(torch.float64).tiny
RUNS = 4  # of an input as a whole, without corrections: gradients, as given, everything kept, what was chosen

Choice = Mapping[str, Tensor]  # by layer, int64 [heads]: indices of the grid
Try = Callable[[str, Choice], float]


def steps_of(layers: int) -> int:
    """Steps that an input takes, at most: runs of it, and its layers measured."""
    return RUNS + CORRECTIONS + layers


def search_by_prediction(search: Search, budget: float | None) -> Profile:
    """The fewest blocks that move the output by no more than `budget`; None: than the config as it was given."""
    dense = Dense(search)
    layers = survey(search, "heads", lambda _, heads: grid(search.base, heads), dense.gradients)
    try_ = _tryer(search, dense, layers)
    as_given, everything = (_all_heads(layers, index) for index in (AS_GIVEN, EVERYTHING_KEPT))
    heads = _of_all_heads(layers)
    damage = _promised(heads, draws_on(dense.output(0).device, search.subject.knows_loss))
    given, rounding = try_("as given", as_given), 0.0
    exact = dense.output(0).dtype == torch.float32 and damage[EVERYTHING_KEPT].sum() <= NOTHING * damage[AS_GIVEN].sum()
    if not exact:
        rounding = try_("everything kept", everything)
    allowed = given if budget is None else budget
    if min(promised := float(damage[AS_GIVEN].sum()), given - rounding) > 0:
        damage = damage * ((given - rounding) / promised)
    aside = LOSS_WEIGHT * heads.loss * (damage[AS_GIVEN].sum() / heads.loss[AS_GIVEN].abs().sum().clamp(min=TINY))
    choose = functools.partial(within_budget, heads.executed, damage, aside=aside)
    found = [(as_given, given), *_tried_as_a_whole(layers, choose, rounding, allowed, try_)]
    good = [(choice, divergence) for choice, divergence in found if divergence <= allowed]
    choice, divergence = min(good or [(everything, rounding)], key=lambda one: share_executed(layers, one[0]))
    metrics = {
        "divergence": divergence, "allowed": allowed, "executed": share_executed(layers, choice),
        "inputs": float(len(search.inputs)), "share": search.share,
    }  # fmt: skip
    made = {name: layer.profile(choice[name]) for name, layer in layers.items()}
    return Profile(search.subject.name, search.base, made, metrics, versions())


def _all_heads(layers: Mapping[str, Layer], index: int) -> Choice:
    return {name: torch.full_like(layer.measured.visible, index, dtype=torch.int64) for name, layer in layers.items()}


def _of_all_heads(layers: Mapping[str, Layer]) -> Measurement:
    """Of all layers, one after the other."""
    parts = zip(*(layer.measured.parts() for layer in layers.values()), strict=True)
    return Measurement(*(torch.cat(part, -1) for part in parts))


def _tried_as_a_whole(
    layers: Mapping[str, Layer], choose: Callable[[float], Tensor], rounding: float, allowed: float, try_: Try
) -> Iterator[tuple[Choice, float]]:
    """What gradients promise to be within the budget, run with all layers sparse; corrected by what that did."""
    sizes = [len(layer.measured.visible) for layer in layers.values()]
    budget, before = HELD_BACK * (allowed - rounding), None
    if budget <= 0:
        return
    for _ in range(1 + CORRECTIONS):
        chosen = choose(budget)
        if before is not None and torch.equal(chosen, before):
            return
        before = chosen
        choice = dict(zip(layers, chosen.split(sizes), strict=True))
        divergence = try_("together", choice)
        yield choice, divergence
        if divergence <= allowed:
            return
        budget *= CORRECTED * (allowed - rounding) / (divergence - rounding)


def _promised(heads: Measurement, draws: int) -> Tensor:
    """The divergence that each candidate of each head adds, [candidates, heads], but for a factor.

    Partly from the errors along the gradients, which chance has the less of the more are drawn, partly from how large
    both are, brought to the same total: each alone chooses worse.
    """
    ratio = heads.moved.sum() / heads.expected.sum().clamp(min=TINY) if draws else 1.0
    trust = draws / (draws + DISTRUST)
    damage: Tensor = trust * heads.moved + (1 - trust) * ratio * heads.expected
    return damage


# ---- running the model


class Dense:
    """The dense model's outputs, computed with the gradients or when they are asked for."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.outputs: dict[int, Tensor] = {}

    def gradients(self, index: int) -> Gradients:
        search = self.search
        self.outputs[index], found = drawn_gradients(
            search.subject, search.inputs[index], search.base, search.share, search.seed + index
        )
        search.on_step("gradients", "")
        return found

    def output(self, index: int) -> Tensor:
        if index not in self.outputs:
            with torch.no_grad():
                self.outputs[index] = self.search.subject.predict(self.search.inputs[index], exact_attention)
        return self.outputs[index]


def _tryer(search: Search, dense: Dense, layers: Mapping[str, Layer]) -> Try:
    def try_(stage: str, choice: Choice) -> float:
        settings = {name: layer.picked(choice[name]) for name, layer in layers.items()}
        divergence = 0.0
        for index in range(len(search.inputs)):
            key = f"prediction/{index}/{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}"
            if key not in search.journal.records:
                search.journal.add(key, _moved(search, index, dense.output(index), settings))
            divergence += _checked_record(search.journal.records[key], key) / len(search.inputs)
            search.on_step(stage, "")
        return divergence

    return try_


def _moved(search: Search, index: int, dense: Tensor, settings: Mapping[str, Settings]) -> float:
    """How far one input's output moves."""

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            inputs = prepare_inputs(query, key, value, **arguments)
            values, _ = sparse_output(inputs, with_settings(search.base, settings[layer]))
        return restore(values, inputs.layout)

    with torch.no_grad():
        other = search.subject.predict(search.inputs[index], attend)
        rows = sample_blocks(_as_rows(dense).shape[0], search.share, search.seed + index).to(dense.device)
        moved = search.subject.divergence(_as_rows(dense)[rows], _as_rows(other)[rows])
    if not math.isfinite(moved):
        raise ValueError("the model's output is not finite: not tuned.")
    return moved


def _as_rows(output: Tensor) -> Tensor:
    return output.reshape(-1, output.shape[-1] if output.dim() else 1)


def _checked_record(value: Any, where: str) -> float:
    """A journal is a file like any other."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise JournalError(f"the journal's record of {where} is damaged; delete the journal or name another.")
    return float(value)
