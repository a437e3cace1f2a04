"""What a run found out, and its JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from sparge.bench.cases import Case

MEASURED, WRONG, FAILED, NOT_RUN = "measured", "wrong", "failed", "not run"
OURS = ("total", "attend", "predict", "prepare", "select")  # predict: the last two, as a call runs them
GRAPHED = tuple(f"graph_{name}" for name in OURS)


@dataclass(frozen=True)
class Timing:
    """One contender, or one part of ours: its median, or the reason why there is none."""

    name: str
    milliseconds: float | None
    ratio: float | None = None  # the base contender's time over this one
    relative_l1: float | None = None  # of its result, where it has one
    reason: str = ""
    note: str = ""  # what was done for it outside its time


@dataclass(frozen=True)
class Row:
    """One case. Only an outcome of "measured" has times of ours."""

    case: Case
    outcome: str
    reason: str = ""
    heads: int = 0
    backend: str = ""
    skipped: float | None = None  # share of visible blocks, as counted in the mask
    base: str = ""
    relative_l1: float | None = None
    max_relative_l1: float | None = None
    extra_memory: float | None = None  # peak beyond inputs and output, of Q + K + V + O
    timings: tuple[Timing, ...] = ()

    def timing(self, name: str) -> Timing | None:
        return next((timing for timing in self.timings if timing.name == name), None)

    def milliseconds(self, name: str) -> float | None:
        timing = self.timing(name)
        return None if timing is None else timing.milliseconds

    def ratio(self, name: str) -> float | None:
        timing = self.timing(name)
        return None if timing is None else timing.ratio

    @property
    def prediction_share(self) -> float | None:
        """Preparation and selection, of the base contender's time; older files have their times apart only."""
        predict, prepare, select, base = map(self.milliseconds, ("predict", "prepare", "select", self.base))
        if predict is None and prepare is not None and select is not None:
            predict = prepare + select
        return None if predict is None or base is None else predict / base

    @property
    def operations(self) -> float:
        """Of dense attention: two products of tokens x tokens x head_dim, half of it under causal order."""
        case = self.case
        return 4.0 * self.heads * case.tokens**2 * case.head_dim / (2 if case.causal else 1)

    def tflops(self, name: str) -> float | None:
        """Dense-equivalent operations over time."""
        taken = self.milliseconds(name)
        return None if taken is None else self.operations / taken / 1e9


@dataclass(frozen=True)
class Results:
    """A whole run."""

    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    interrupted: bool = False

    @property
    def any_wrong(self) -> bool:
        return any(row.outcome in (WRONG, FAILED) for row in self.rows)

    def missing(self) -> Counter[str]:
        """Why which contender or case has no time, and how often."""
        reasons = [f"{row.case.mask} case: {row.reason}" for row in self.rows if row.outcome == NOT_RUN]
        reasons += [f"{t.name}: {t.reason}" for row in self.rows for t in row.timings if t.reason]
        return Counter(reasons)

    def notes(self) -> Counter[str]:
        """What was done for contenders outside their time, and how often."""
        return Counter(f"{t.name}: {t.note}" for row in self.rows for t in row.timings if t.note)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Results:
        facts = json.loads(text)
        rows = []
        for row in facts.pop("rows"):
            case, timings = Case(**row.pop("case")), tuple(Timing(**timing) for timing in row.pop("timings"))
            rows.append(Row(case=case, timings=timings, **row))
        return cls(rows=tuple(rows), **facts)
