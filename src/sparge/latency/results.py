"""What a run found out, the arithmetic on it, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sparge.bench.results import FAILED, MEASURED, WRONG
from sparge.latency.catalogue import Model, Paper

BAR = 0.95  # of the speed-up that Amdahl's law allows


def amdahl(share: float, speedup: float) -> float:
    """The speed-up of the whole if a share of its time becomes faster.

    >>> amdahl(0.5, 2.0)
    1.3333333333333333
    """
    return 1 / (1 - share + share / speedup)


@dataclass(frozen=True)
class Times:
    """Milliseconds: whole steps in the order they were made, and attention alone, of all layers together."""

    dense_steps: tuple[float, ...]
    sparse_steps: tuple[float, ...]
    dense_attention: float
    sparse_attention: float

    @property
    def dense(self) -> float:
        return median(self.dense_steps)

    @property
    def sparse(self) -> float:
        return median(self.sparse_steps)

    @property
    def speedup(self) -> float:
        return self.dense / self.sparse

    @property
    def share(self) -> float:
        """Of a dense step that attention takes; not more than all of it, however noisy the machine is."""
        return min(1.0, self.dense_attention / self.dense)

    @property
    def attention_speedup(self) -> float:
        return self.dense_attention / self.sparse_attention

    @property
    def allowed(self) -> float:
        """By Amdahl's law."""
        return amdahl(self.share, self.attention_speedup)

    @property
    def achieved(self) -> float:
        """Of what is allowed."""
        return self.speedup / self.allowed


@dataclass(frozen=True)
class Shape:
    """Of the attention that sparge takes, as seen in the model."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    causal: bool
    calls: int  # per step


@dataclass(frozen=True)
class Row:
    """One model. Only an outcome of "measured" has times."""

    name: str
    title: str
    outcome: str
    reason: str = ""
    asked_sparsity: float = 0.0
    paper: Paper | None = None
    weights: int = 0  # parameters
    shape: Shape | None = None
    skipped: float | None = None  # share of visible blocks, as counted
    quantization: str = ""
    backends: tuple[str, ...] = ()  # that computed the sparse calls
    dense_kernels: tuple[str, ...] = ()
    call_error: float | None = None  # relative L1 of one attention call with nothing skipped, against dense
    step_error: float | None = None  # the same of the model's output
    peak_gib: float | None = None
    times: Times | None = None

    @classmethod
    def of(cls, model: Model, outcome: str, reason: str = "", **facts: Any) -> Row:
        return cls(model.name, model.title, outcome, reason, model.sparsity, model.paper, **facts)

    def facts(self) -> dict[str, Any]:
        """The fields, and what follows from the times."""
        facts = asdict(self)
        if self.times is not None:
            names = ("dense", "sparse", "speedup", "share", "attention_speedup", "allowed", "achieved")
            facts["derived"] = {name: getattr(self.times, name) for name in names}
            facts["derived"]["passes"] = self.times.achieved >= BAR
        return facts

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Row:
        given = {name: value for name, value in facts.items() if name != "derived"}
        for name, kind in (("paper", Paper), ("shape", Shape), ("times", Times)):
            if given[name] is not None:
                given[name] = kind(**{key: _tuple(value) for key, value in given[name].items()})
        return cls(**{name: _tuple(value) for name, value in given.items()})


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

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.outcome == MEASURED]

    def to_json(self) -> str:
        facts = {**asdict(self), "rows": [row.facts() for row in self.rows]}
        return json.dumps(facts, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Results:
        facts = json.loads(text)
        rows = tuple(Row.from_facts(row) for row in facts.pop("rows"))
        return cls(rows=rows, **facts)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
