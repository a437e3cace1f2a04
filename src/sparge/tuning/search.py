"""tune(): a model, a few inputs and a bound on the error -> a Profile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.profile import Profile
from sparge.tuning.choose import within_bound, within_budget
from sparge.tuning.gradients import sensitivity
from sparge.tuning.job import OnStep, Search, versions
from sparge.tuning.journal import Journal, digest, fingerprint
from sparge.tuning.ladder import COARSE, FINE, PV_OFF, PV_THRESHOLDS, Settings, settings_at
from sparge.tuning.measure import Measurement
from sparge.tuning.prediction import search_by_prediction
from sparge.tuning.subjects import Loss, subject_of
from sparge.tuning.survey import Layer, share_executed, survey

SPENDS = ("model", "head", "prediction")
L1 = 0.02  # unless told otherwise


def tune(
    model: Any,
    inputs: Sequence[Any],
    *,
    l1: float | None = None,
    l2: float | None = None,
    spend: str | None = None,
    divergence: float | None = None,
    config: SparseConfig | None = None,
    loss: Loss | None = None,
    name: str | None = None,
    share: float | None = None,
    seed: int = 0,
    journal: str | Path | None = None,
    on_step: OnStep | None = None,
) -> Profile:
    """Search settings per layer and head that skip as many blocks as an error bound allows.

    model    a causal language model of transformers, a transformer of diffusers, or a function run(item, attend) that
             runs a model on one input and computes each attention layer as attend(layer_name, query, key, value,
             is_causal=..., ...), which takes the arguments of sparge.attention and returns exact attention
    inputs   a handful, each as long as those to come; for a model of transformers token ids [batch, tokens], for one of
             diffusers the arguments of its forward, as a dict
    l1       bound on the relative L1 of each head's output, over all inputs (0.02); l2 (more than l1) is that with the
             second stage, pv_threshold, which is left as it is without l2
    spend    "prediction": how strict each head may be is judged by the model's own output: the Kullback-Leibler
             divergence of a language model's predictions in nats a token, the relative squared error of others'
             outputs. What single heads do to it comes from a few gradients, so the output must be differentiable; a
             function must return it. No l1, no l2
             "head": every head may err by l1, as in the paper. "model": the squared error that these settings add up
             to is one budget for the model, spent where it saves most blocks. Heads are weighted by the gradient of
             the loss where one is known (models of transformers, or `loss`), else by the size of the layer's output
             None: "prediction" for models or a divergence, unless l1, l2 or loss is given; else "model"
    divergence  of "prediction": what all heads together may do to the output (no more than `config` itself does)
    config   what is tuned: its rules' settings are the starting point, everything else stays as it is
    loss     loss(item, attend) -> scalar, for a function
    share    of query blocks on which errors are measured, drawn with seed; blocks are counted on all. For "prediction",
             also of the output's rows (tokens) that are compared. None: a quarter; for "prediction" all, because what
             harms a prediction is rare
    journal  file that keeps what was measured: the same search goes on from it
    on_step  called as on_step(stage, layer) whenever a layer has been measured

    One layer's Q, K and V of one input are in memory at a time, but where gradients are computed, which need every
    layer's activations. The model runs on each input two or three times ("prediction": five, up to three more if what
    was chosen moves it too far, and 8 times backwards, on a CPU once); only settings that were measured are returned.
    """
    of_heads = {"l1": l1, "l2": l2, "loss": loss}
    if spend is None:
        spend = default_spend(isinstance(model, torch.nn.Module) or divergence is not None, of_heads.values())
    if share is None:
        share = 1.0 if spend == "prediction" else 0.25
    base = _checked(l1, l2, spend, config, share, inputs)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, not {seed!r}.")
    _check_prediction(spend, of_heads, divergence)
    subject = subject_of(model, name, loss)
    try:
        job = {
            "model": subject.name, "weights": fingerprint(model), "inputs": digest(inputs), "config": base.encoded,
            "share": share, "seed": seed, "versions": versions(),
        }  # fmt: skip
        place = None if journal is None else Path(journal)
        search = Search(subject, list(inputs), base, share, seed, Journal(place, job), on_step or (lambda *_: None))
        if spend == "prediction":
            return search_by_prediction(search, divergence)
        return _search(search, L1 if l1 is None else l1, l2, spend == "model")
    finally:
        subject.close()


def default_spend(has_output: bool, of_heads: Iterable[Any]) -> str:
    """What judges heads where nobody said: the model's output, unless their own errors are bounded or weighed."""
    return "prediction" if has_output and all(value is None for value in of_heads) else "model"


def _search(search: Search, l1: float, l2: float | None, by_model: bool) -> Profile:
    spending = Spending(by_model, _weights(search) if by_model else None)
    layers = survey(search, "coarse", lambda _, heads: _settings(search.base, _rungs(heads)))
    budget = spending.budget(layers, l1)
    nearest = {
        name: _rungs(len(picked)).gather(0, picked[None])[0]
        for name, picked in spending.choose(layers, l1, budget).items()
    }
    around = {name: [strictness + step for step in FINE] for name, strictness in nearest.items()}
    more = survey(search, "fine", lambda name, _: _settings(search.base, around[name]))
    layers = {name: layers[name].joined(found) for name, found in more.items()}
    chosen = spending.choose(layers, l1, budget)
    bounds = {"l1": l1}
    if l2 is not None:
        layers = _second_stage(search, layers, chosen)
        chosen = spending.choose(layers, l2, budget * (l2 / l1) ** 2, products=True)
        bounds["l2"] = l2
    return _profile(search, layers, chosen, bounds)


def _rungs(heads: int) -> Tensor:
    return torch.tensor(COARSE, dtype=torch.float64)[:, None].expand(-1, heads)


def _settings(base: SparseConfig, rungs: Iterable[Tensor]) -> list[Settings]:
    return [settings_at(base, strictness) for strictness in rungs]


def _second_stage(search: Search, layers: dict[str, Layer], chosen: dict[str, Tensor]) -> dict[str, Layer]:
    """The chosen settings again, without and with the second stage."""
    first = {name: layer.picked(chosen[name]) for name, layer in layers.items()}

    def plan(layer: str, heads: int) -> list[Settings]:
        return [{**first[layer], "pv_threshold": (value,) * heads} for value in (PV_OFF, *PV_THRESHOLDS)]

    return survey(search, "second stage", plan)


# ---- choosing


def _weights(search: Search) -> dict[str, Tensor] | None:
    """Per layer float64 [heads], from the loss; None without one."""
    if search.subject.loss is None:
        return None
    known = search.journal.records.get("weights")
    if known is None:
        found = sensitivity(search.subject.loss, search.inputs, lambda: search.on_step("weighing heads", ""))
        known = {name: weight.tolist() for name, weight in found.items()}
        search.journal.add("weights", known)
    return {name: torch.tensor(weight, dtype=torch.float64) for name, weight in known.items()}


@dataclass(frozen=True)
class Spending:
    """Who may err: every head by the bound, or the model by one budget, its heads weighted if weights are known."""

    by_model: bool
    weights: dict[str, Tensor] | None = None

    def choose(
        self, layers: dict[str, Layer], bound: float, budget: float, products: bool = False
    ) -> dict[str, Tensor]:
        """The candidate of each head, int64 [heads] per layer. Work is blocks, or the products of the second stage."""
        work = {name: getattr(one.measured, "products" if products else "executed") for name, one in layers.items()}
        if not self.by_model:
            return {name: within_bound(work[name], one.measured.relative_l1, bound) for name, one in layers.items()}
        damage = [self._damage(name, one.measured) for name, one in layers.items()]
        chosen = within_budget(torch.cat(list(work.values()), 1), torch.cat(damage, 1), budget)
        return dict(zip(layers, chosen.split([part.shape[1] for part in damage]), strict=True))

    def budget(self, layers: dict[str, Layer], bound: float) -> float:
        """What the model suffers where every head errs as much as the bound allows.

        Candidates stop short of the bound; damage grows with the square of the error.
        """
        total = 0.0
        for name, one in layers.items():
            error = one.measured.relative_l1
            chosen = within_bound(one.measured.executed, error, bound)[None]
            short = (bound / error.gather(0, chosen)).clamp(min=1).nan_to_num(posinf=1.0)  # inf: no error at all
            total += float((self._damage(name, one.measured).gather(0, chosen) * short.square()).sum())
        return total

    def _damage(self, layer: str, measured: Measurement) -> Tensor:
        """What each candidate does to the model, [candidates, heads], comparable between layers."""
        if self.weights is None:
            return measured.squared_error / measured.squared.sum().clamp(min=torch.finfo(torch.float64).tiny)
        return measured.squared_error * self.weights[layer]


# ---- the result


def _profile(search: Search, layers: dict[str, Layer], chosen: dict[str, Tensor], bounds: dict[str, float]) -> Profile:
    made = {name: layer.profile(chosen[name]) for name, layer in layers.items()}
    executed = share_executed(layers, chosen)
    metrics = {**bounds, "executed": executed, "inputs": float(len(search.inputs)), "share": search.share}
    return Profile(search.subject.name, search.base, made, metrics, versions())


def _check_prediction(spend: str, of_heads: dict[str, Any], divergence: float | None) -> None:
    given = [name for name, value in of_heads.items() if value is not None]
    if spend == "prediction" and given:
        raise ValueError(f"{given[0]} is for the errors of heads; spend='prediction' takes divergence instead.")
    if divergence is None:
        return
    if spend != "prediction":
        raise ValueError(f"divergence is for spend='prediction', not {spend!r}.")
    if isinstance(divergence, bool) or not isinstance(divergence, (int, float)):
        raise TypeError(f"divergence must be a number, not {divergence!r}.")
    if not 0 < divergence < math.inf:
        raise ValueError(f"divergence must lie above 0, not {divergence!r}.")


def _checked(
    l1: float | None, l2: float | None, spend: str, config: SparseConfig | None, share: float, inputs: Sequence[Any]
) -> SparseConfig:
    for name, bound in (("l1", l1), ("l2", l2), ("share", share)):
        if isinstance(bound, bool) or not isinstance(bound, (int, float, type(None))):
            raise TypeError(f"{name} must be a number, not {bound!r}.")
    for name, bound in (("l1", l1), ("l2", l2)):
        if bound is not None and not 0 < bound < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {bound!r}.")
    first = L1 if l1 is None else l1
    if l2 is not None and l2 <= first:
        raise ValueError(f"l2={l2} must be more than l1={first}: it is the error of both stages together.")
    if spend not in SPENDS:
        raise ValueError(f"spend must be one of {SPENDS}, not {spend!r}.")
    if not 0 < share <= 1:
        raise ValueError(f"share must lie above 0 and up to 1, not {share!r}.")
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence) or not inputs:
        raise TypeError("inputs must be a list or tuple of at least one input.")
    if config is not None and not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a sparge.SparseConfig, not {type(config).__name__}.")
    config = config or SparseConfig()
    if config.max_error is not None:
        raise ValueError(
            "max_error is checked in each call, not searched for: leave it out, and add it to what is found."
        )
    if l2 is not None and config.pv_threshold is not None:
        raise ValueError("l2 searches pv_threshold, and config sets it: leave one of them out.")
    return config
