"""Every layer of a model on every input under many settings, measured when the model calls it; kept in a journal."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge.inputs import prepare_inputs, restore
from sparge.profile import LayerProfile, check_name
from sparge.tuning.gradients import Gradients
from sparge.tuning.job import Search
from sparge.tuning.journal import pack, unpack
from sparge.tuning.ladder import Settings, with_settings
from sparge.tuning.measure import Measurement, exact_output, finer, measure

Plan = Callable[[str, int], list[Settings]]  # (layer, heads) -> the settings to try, each a vector per head
GradientsOf = Callable[[int], Gradients]  # of an input


@dataclass(frozen=True)
class Layer:
    """What is known of one layer: the settings tried, and how they did on all inputs."""

    tried: list[Settings]
    measured: Measurement

    def joined(self, other: Layer) -> Layer:
        return Layer(self.tried + other.tried, self.measured.joined(other.measured))

    def profile(self, chosen: Tensor) -> LayerProfile:
        """With each head's own candidate, int64 [heads]."""
        executed = (self.measured.executed / self.measured.visible.clamp(min=1)).gather(0, chosen[None])[0]
        error = self.measured.relative_l1.gather(0, chosen[None])[0]
        return LayerProfile(self.picked(chosen), tuple(executed.tolist()), tuple(error.tolist()))

    def picked(self, chosen: Tensor) -> Settings:
        """Each head's own candidate, as one vector per setting."""
        indices = list(enumerate(chosen.tolist()))
        return {name: tuple(self.tried[index][name][head] for head, index in indices) for name in self.tried[0]}


def share_executed(layers: Mapping[str, Layer], chosen: Mapping[str, Tensor]) -> float:
    count = sum(float(layer.measured.visible.sum()) for layer in layers.values())
    done = sum(float(layers[name].measured.executed.gather(0, chosen[name][None]).sum()) for name in layers)
    return done / max(1.0, count)


def survey(search: Search, stage: str, plan: Plan, gradients_of: GradientsOf | None = None) -> dict[str, Layer]:
    """Every layer on every input under the plan's settings; an input that the journal holds whole is not run.

    gradients_of  what an error of a head does to the output, if that is to be measured too
    """
    layers: dict[str, Layer] = {}
    for index in range(len(search.inputs)):
        known_calls = _calls(search, index, plan)
        if all(key in search.journal.records for key, _, _ in known_calls):
            for _, name, _ in known_calls:
                search.on_step(stage, name)
        else:
            gradients = None if gradients_of is None else gradients_of(index)
            with torch.no_grad():
                _run_measured(search, stage, index, plan, gradients)
        for key, name, heads in _calls(search, index, plan):
            found, known = unpack(search.journal.records[key], key), layers.get(name)
            if known is None:
                layers[name] = Layer(plan(name, heads), found)
            else:
                layers[name] = replace(known, measured=known.measured + found)
    return layers


def _calls(search: Search, index: int, plan: Plan) -> list[tuple[str, str, int]]:
    """Journal key, layer and heads of every attention call on an input; before its first run, one key of no record."""
    known = search.journal.records.get(f"calls/{index}")
    if known is None:
        return [(f"calls/{index}", "", 0)]
    counted: Counter[str] = Counter()
    calls = []
    for name, heads in known:
        calls.append((_record(index, name, counted[name], plan(name, heads)), name, heads))
        counted[name] += 1
    return calls


def _record(index: int, layer: str, call: int, tried: list[Settings]) -> str:
    """The settings are part of the key: a search with another bound finds what it shares with this one."""
    return f"{index}/{layer}/{call}/{hashlib.sha256(json.dumps(tried).encode()).hexdigest()[:16]}"


def _run_measured(search: Search, stage: str, index: int, plan: Plan, gradients: Gradients | None) -> None:
    """One input through the model: each layer is measured when it is called, then its Q, K and V are let go."""
    journal = search.journal
    counted: Counter[str] = Counter()
    calls: list[tuple[str, int]] = []

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        check_name(layer)  # now, not when the profile is made
        with torch.autocast(query.device.type, enabled=False):
            fine = (query, key, value) if gradients is None else finer(query, key, value)
            inputs = prepare_inputs(*fine, **arguments)
            exact, heads = exact_output(inputs), inputs.query.shape[1]
            if not exact.isfinite().all():
                raise ValueError(f"layer {layer!r} gives numbers that are not finite on input {index}: not tuned.")
            search.base.check_heads(heads)
            tried = plan(layer, heads)
            record = _record(index, layer, counted[layer], tried)
            if record not in journal.records:
                candidates = [with_settings(search.base, one) for one in tried]
                gradient = None if gradients is None else gradients[layer, counted[layer]]
                found = measure(inputs, exact, candidates, search.share, search.seed + index, gradient)
                journal.add(record, pack(found))
        counted[layer] += 1
        calls.append((layer, heads))
        search.on_step(stage, layer)
        return restore(exact, inputs.layout).to(query.dtype)

    search.subject.run(search.inputs[index], attend)
    if not calls:
        raise ValueError("the model computed no attention by `attend`: there is nothing to tune.")
    journal.add(f"calls/{index}", calls)
