"""What an evaluation of a language model found, case by case, and summed up in rows: dense against sparse, paired."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from sparge.evaluate.statistics import mean_interval, share_interval, sign_test
from sparge.evaluate.tasks import GREEDY, NEEDLE, PPL, Facts

DENSE = "dense"


@dataclass(frozen=True)
class Reading:
    """One case, one way. Which of the judgements are there depends on the task."""

    seconds: float  # of the prefill
    executed: int  # blocks that sparge computed, of those it could see; both 0 on the dense way
    visible: int
    backends: dict[str, int]  # sparge's calls by backend
    loss: float | None = None  # mean over tokens, nats
    losses: list[float] | None = None  # the same, by stretches of tokens
    divergence: float | None = None  # KL of the dense way's distribution from this one's, nats per token
    same: float | None = None  # share of tokens at which both ways have the same best guess
    score: float | None = None  # share of answers found, or of continued tokens that are equal
    equal_until: int | None = None  # continued tokens before the first difference


@dataclass(frozen=True)
class CaseResult:
    """One case, every way."""

    task: str
    name: str
    facts: Facts
    readings: dict[str, Reading]


@dataclass(frozen=True)
class Row:
    """One line of the table: the cases of a task, a length and a kind, under one variant.

    dense and sparse are perplexities, or mean scores. The change is relative for perplexities, else a difference;
    low and high are its 95 % interval. Greedy continuations have no dense score: what is equal is the score.
    """

    task: str
    tokens: int
    on: str
    variant: str
    cases: int
    dense: float | None
    sparse: float
    change: float | None
    low: float | None
    high: float | None
    divergence: float | None
    same: float | None
    lost: int | None  # cases with a lower score
    gained: int | None
    chance: float | None  # of so uneven a split of lost and gained, if settings made no difference
    skipped: float  # share of visible blocks
    dense_seconds: float  # medians
    sparse_seconds: float
    speedup: float  # the median over cases


@dataclass
class LanguageResults:
    """A whole run."""

    model: str
    variants: dict[str, Any]
    plans: dict[str, str]  # what each variant makes of the model's layers
    about: dict[str, Any] = field(default_factory=dict)  # command, machine, versions, options
    cases: list[CaseResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def rows(self) -> list[Row]:
        return [_row(group, variant) for variant in self.variants for group in self._groups()]

    def _groups(self) -> Iterator[list[CaseResult]]:
        """Cases by task, length and kind; where perplexity was measured on several texts, all of them together too."""
        for _, same_length in groupby(self.cases, lambda case: (case.task, case.facts["tokens"])):
            cases = list(same_length)
            kinds = list(dict.fromkeys(map(_kind, cases)))
            for kind in kinds:
                yield [case for case in cases if _kind(case) == kind]
            if cases[0].task == PPL and len(kinds) > 1:
                yield cases

    def all_dense(self) -> list[str]:
        """Variants of which sparge got calls, and left every one to dense attention."""
        used = {
            variant: {name for case in self.cases for name in case.readings[variant].backends}
            for variant in self.variants
        }
        return [variant for variant, backends in used.items() if backends == {"dense"}]

    def to_json(self) -> str:
        facts = {
            "model": self.model,
            **self.about,
            "variants": self.variants,
            "plans": self.plans,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows()],
            "cases": [asdict(case) for case in self.cases],
        }
        return json.dumps(facts, indent=1, allow_nan=False)


def _kind(case: CaseResult) -> str:
    """What a case's row is on: a text, or how many keys; the other tasks have one kind per run."""
    if case.task in (PPL, GREEDY):
        return str(case.facts["text"])
    if case.task == NEEDLE:
        return f"{case.facts['keys']} key{'s' if case.facts['keys'] != 1 else ''}"
    name = "values" if "values" in case.facts else "hops"
    return f"{case.facts[name]} {name}"


def _row(cases: Sequence[CaseResult], variant: str) -> Row:
    first = cases[0]
    dense, sparse = ([case.readings[way] for case in cases] for way in (DENSE, variant))
    kinds = dict.fromkeys(map(_kind, cases))
    visible = sum(reading.visible for reading in sparse)
    judged = _perplexities(dense, sparse) if first.task == PPL else _scores(first.task, dense, sparse)
    return Row(
        task=first.task,
        tokens=int(first.facts["tokens"]),
        on=next(iter(kinds)) if len(kinds) == 1 else f"all {len(kinds)}",
        variant=variant,
        cases=len(cases),
        skipped=(visible - sum(reading.executed for reading in sparse)) / max(1, visible),
        dense_seconds=median(reading.seconds for reading in dense),
        sparse_seconds=median(reading.seconds for reading in sparse),
        speedup=median(a.seconds / b.seconds for a, b in zip(dense, sparse, strict=True)),
        **judged,
    )


def _perplexities(dense: Sequence[Reading], sparse: Sequence[Reading]) -> dict[str, Any]:
    """Statistics of the mean loss, whose pairs are stretches of tokens; shown as perplexity."""
    before, after = (_mean([reading.loss for reading in way]) for way in (dense, sparse))
    differences = [
        other - one
        for a, b in zip(dense, sparse, strict=True)
        for one, other in zip(a.losses or (), b.losses or (), strict=True)
    ]
    interval = mean_interval(differences)
    low, high = (None, None) if interval is None else (math.expm1(bound) for bound in interval)
    return {
        "dense": math.exp(before),
        "sparse": math.exp(after),
        "change": math.expm1(after - before),
        "low": low,
        "high": high,
        "divergence": _mean([reading.divergence for reading in sparse]),
        "same": _mean([reading.same for reading in sparse]),
        **dict.fromkeys(("lost", "gained", "chance")),
    }


def _scores(task: str, dense: Sequence[Reading], sparse: Sequence[Reading]) -> dict[str, Any]:
    if task == GREEDY:
        score = _mean([reading.score for reading in sparse])
        names = ("dense", "change", "low", "high", "divergence", "lost", "gained", "chance")
        return {"sparse": score, "same": score, **dict.fromkeys(names)}
    before, after = ([float(reading.score or 0) for reading in way] for way in (dense, sparse))
    differences = [b - a for a, b in zip(before, after, strict=True)]
    lost, gained = sum(x < 0 for x in differences), sum(x > 0 for x in differences)
    whole = all(score in (0, 1) for score in (*before, *after))
    interval = share_interval(lost, gained, len(before)) if whole else mean_interval(differences)
    low, high = interval or (None, None)
    return {
        "dense": _mean(before),
        "sparse": _mean(after),
        "change": _mean(differences),
        "low": low,
        "high": high,
        "divergence": None,
        "same": None,
        "lost": lost,
        "gained": gained,
        "chance": sign_test(lost, gained),
    }


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
