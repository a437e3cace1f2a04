"""A causal language model read both ways, dense and sparse: the same tokens, judged by what each way predicts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import __version__
from sparge.config import SparseConfig
from sparge.evaluate.results import DENSE, CaseResult, LanguageResults, Reading
from sparge.evaluate.tasks import GREEDY, PPL, Case
from sparge.integrations.patch import patch
from sparge.integrations.transformers.predictions import divergence, logits_of, stretches
from sparge.observe import Observed, observed
from sparge.profile import Profile
from sparge.tuning.journal import Journal, digest

STRETCH = 256  # tokens whose losses are averaged: the points of the curve by position, and the pairs of the statistics
WARM_UP_TOKENS = 2304  # on a CPU: enough for sparge not to leave the call to torch

OnStep = Callable[[str, int], None]  # what was done, tokens read


@dataclass(frozen=True)
class Variant:
    """Settings to be judged: a config, a profile, or a profile and a config for the layers that it does not name."""

    name: str
    config: SparseConfig | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.name == DENSE:
            raise ValueError(f"settings cannot be called {DENSE}, which is what they are compared with.")

    @property
    def described(self) -> dict[str, Any]:
        """As plain values."""
        config = self.config if self.config is not None or self.profile is not None else SparseConfig()
        return {
            "config": None if config is None else _plain(config),
            "profile": None if self.profile is None else _named(self.profile),
        }


def _plain(config: SparseConfig) -> dict[str, Any]:
    """JSON has no infinity, which a gap may be."""
    return {name: "inf" if value == math.inf else value for name, value in asdict(config).items()}


def _named(profile: Profile) -> dict[str, Any]:
    """Enough to tell one profile from another."""
    settings = [profile.base.encoded, {name: dict(layer.settings) for name, layer in profile.layers.items()}]
    return {"model": profile.model, "layers": len(profile.layers), "digest": digest(settings)}


@dataclass(frozen=True)
class Pass:
    """One way through one case."""

    output: Tensor  # hidden states [tokens, width], or the tokens that were generated
    seconds: float
    executed: int
    visible: int
    backends: dict[str, int]


@torch.no_grad()
def evaluate(
    model: Any,
    cases: Sequence[Case],
    variants: Sequence[Variant] = (Variant("default"),),
    *,
    name: str | None = None,
    journal: Path | None = None,
    on_step: OnStep | None = None,
) -> LanguageResults:
    """Every case dense and under every variant, in one run.

    model     a causal language model of transformers, ready for inference, on its device
    cases     see tasks.py
    journal   file that keeps each case as it is done: the same evaluation goes on from it
    on_step   called as on_step(what, tokens) after each pass, with the tokens it read

    Ctrl-C ends it early: the results say so, and hold the cases that are done.
    """
    _check(model, cases, variants)
    step = on_step or (lambda *_: None)
    name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
    plans = {variant.name: str(patch(model, variant.config, variant.profile, dry_run=True)) for variant in variants}
    job = {
        "model": name, "sizes": str(model.config.to_dict()), "where": f"{model.device} {model.dtype}",
        "versions": f"sparge {__version__}, torch {torch.__version__}",
        "weights": digest(weight.flatten()[:16] for weight in model.parameters()),
        "cases": digest([case.name, torch.tensor(case.ids), case.new_tokens] for case in cases),
        "variants": {variant.name: variant.described for variant in variants},
    }  # fmt: skip
    kept = Journal(journal, job)
    results = LanguageResults(name, {variant.name: variant.described for variant in variants}, plans)
    try:
        _warm_up(model, [case for case in cases if case.name not in kept.records], variants, step)
        for case in cases:
            if case.name in kept.records:
                step(f"{case.name}, kept", len(case.ids) * (1 + len(variants)))
            else:
                measured = _measure(model, case, variants, step)
                kept.add(case.name, {way: asdict(reading) for way, reading in measured.items()})
            readings = {way: Reading(**reading) for way, reading in kept.records[case.name].items()}
            results.cases.append(CaseResult(case.task, case.name, case.facts, readings))
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def _check(model: Any, cases: Sequence[Case], variants: Sequence[Variant]) -> None:
    if not hasattr(model, "base_model") or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"evaluate takes a causal language model of transformers, not {type(model).__name__}.")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; call eval() on it first.")
    for what, names in (("case", [case.name for case in cases]), ("settings", [variant.name for variant in variants])):
        if not names:
            raise ValueError(f"an evaluation needs at least one {what}.")
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ValueError(f"{what} {double!r} is there twice.")


def _warm_up(model: Any, cases: Sequence[Case], variants: Sequence[Variant], step: OnStep) -> None:
    """Kernels are compiled and memory is fetched outside the times: on a GPU kernels depend on the length, roughly."""
    for ids in {len(case.ids) // STRETCH: case.ids for case in cases}.values():
        for variant in (None, *variants):
            step("warming up", 0)
            _read(model, ids if model.device.type == "cuda" else ids[:WARM_UP_TOKENS], variant)
        if model.device.type != "cuda":
            break


def _measure(model: Any, case: Case, variants: Sequence[Variant], step: OnStep) -> dict[str, Reading]:
    passes = {}
    for variant in (None, *variants):
        way = DENSE if variant is None else variant.name
        passes[way] = _continue(model, case, variant) if case.task == GREEDY else _read(model, case.ids, variant)
        step(f"{case.name}, {way}", len(case.ids))
    if passes[DENSE].visible:
        raise ValueError("the model is sparse already: unpatch it, or load it with another attn_implementation.")
    if case.task == PPL:
        judged = _judge_losses(model, case, passes)
    elif case.task == GREEDY:
        judged = {way: _judge_continuation(passes[DENSE].output, one.output) for way, one in passes.items()}
    else:
        judged = {way: _judge_answers(model, case, one.output) for way, one in passes.items()}
    return {
        way: Reading(one.seconds, one.executed, one.visible, one.backends, **judged[way]) for way, one in passes.items()
    }


# ---- running the model


def _under(model: Any, variant: Variant | None) -> Any:
    return nullcontext() if variant is None else patch(model, variant.config, variant.profile)


def _read(model: Any, ids: Sequence[int], variant: Variant | None) -> Pass:
    """The last hidden states of a whole prefill."""
    tokens = torch.tensor([ids], device=model.device)
    with _under(model, variant), observed() as seen:
        start = _now(model)
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state[0]
        seconds = _now(model) - start
    return _passed(hidden, seconds, seen)


def _continue(model: Any, case: Case, variant: Variant | None) -> Pass:
    """The most likely tokens, one after another; the time is that of the prefill."""
    tokens = torch.tensor([case.ids], device=model.device)
    with _under(model, variant), observed() as seen:
        start = _now(model)
        result = model(tokens, use_cache=True, logits_to_keep=1)
        seconds = _now(model) - start
        made = [result.logits[:, -1].argmax(-1)]
        while len(made) < case.new_tokens:
            result = model(made[-1][:, None], past_key_values=result.past_key_values, use_cache=True)
            made.append(result.logits[:, -1].argmax(-1))
    return _passed(torch.cat(made).cpu(), seconds, seen)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _passed(output: Tensor, seconds: float, seen: Observed) -> Pass:
    return Pass(output, seconds, seen.executed, seen.visible, dict(seen.backends))


# ---- judging what it predicts


def _judge_losses(model: Any, case: Case, passes: dict[str, Pass]) -> dict[str, dict[str, Any]]:
    """Loss of every token; of the sparse ways also the divergence from the dense one, and equal best tokens."""
    wanted = torch.tensor(case.ids[1:], device=passes[DENSE].output.device)
    losses: dict[str, list[Tensor]] = {way: [] for way in passes}
    divergences: dict[str, list[Tensor]] = {way: [] for way in passes}
    same: dict[str, list[Tensor]] = {way: [] for way in passes}
    for rows in stretches(len(wanted), wanted.device):
        dense = logits_of(model, passes[DENSE].output[rows]).log_softmax(-1)
        for way, one in passes.items():
            other = dense if way == DENSE else logits_of(model, one.output[rows]).log_softmax(-1)
            losses[way].append(-other.gather(1, wanted[rows, None])[:, 0])
            divergences[way].append(divergence(dense, other))
            same[way].append(dense.argmax(-1) == other.argmax(-1))
    for way in passes:
        if not bool(torch.cat(losses[way]).isfinite().all()):
            raise ValueError(f"{case.name}, {way}: the model's predictions are not finite.")
    return {
        way: {
            "losses": [float(part.double().mean()) for part in torch.cat(losses[way]).split(STRETCH)],
            "loss": float(torch.cat(losses[way]).double().mean()),
            "divergence": max(0.0, float(torch.cat(divergences[way]).double().mean())),
            "same": float(torch.cat(same[way]).double().mean()),
        }
        for way in passes
    }


def _judge_answers(model: Any, case: Case, hidden: Tensor) -> dict[str, Any]:
    """The share of answers all of whose tokens are the most likely ones, the tokens before them given."""
    first, last = case.answers[0][0], case.answers[-1][1]
    wanted = torch.tensor(case.ids[first:last], device=hidden.device)
    right = logits_of(model, hidden[first - 1 : last - 1]).argmax(-1) == wanted
    found = [bool(right[start - first : stop - first].all()) for start, stop in case.answers]
    return {"score": sum(found) / len(found)}


def _judge_continuation(dense: Tensor, other: Tensor) -> dict[str, Any]:
    """The share of equal tokens at equal places, and how many came before the first difference."""
    equal = dense == other
    before = int(equal.long().cumprod(0).sum())
    return {"score": float(equal.double().mean()), "equal_until": before}
