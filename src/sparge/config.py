"""SparseConfig: everything that decides which blocks are computed, and in which number format."""

from __future__ import annotations

import functools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

RULES = ("threshold", "gap", "cdf", "topk", "probe")
QUANTIZATIONS = ("auto", "none", "int8", "int8-fp8")
BLOCK_ROWS = (64, 128, 192, 256)
BLOCK_KEYS = (32, 64, 128)
SUBBLOCKS = (1, 2, 4, 8)
PROBE_ROWS = (1, 2, 4, 8)
RULE_OF = {**{name: name for name in RULES}, "probe_rows": "probe"}  # settings that one rule alone uses

PerHead = float | tuple[float, ...]


@dataclass(frozen=True)
class SparseConfig:
    """Settings of sparse attention; frozen, checked once, usable as a dictionary key.

    Every selection setting is one number, or one number per query head (a sequence or 1-D tensor).

    rule          which predicted blocks to keep: one name or a tuple of names (their union)
    threshold     "threshold": keep a block whose predicted probability exceeds this
    gap           "gap": keep a block whose score lies within this of its row's best (natural log)
    cdf           "cdf" (the paper's TopCdf): keep the best blocks up to this share of probability
    topk          "topk": keep this share of the visible blocks; each of several sub-rows claims its own,
                  so that less is skipped than with subblocks=(1, n)
    probe         "probe": keep a block whose share of the query block's attention exceeds this, as estimated half
                  from predicted scores and half from a few rows scored against every key; beyond 8,192 keys the
                  share asked for falls with the square root of their number
    probe_rows    how many rows of each query block are scored for that: 1, 2, 4 or 8
    subblocks     (rows, keys) sub-means per block that scores are made from; (1, 1) is the paper
    similarity    self-similarity (theta) under which a block is never judged by its mean; None: off
    pv_threshold  second stage: skip P V of 64 rows whose best new score lies this far below their
                  running maximum (negative, natural log); None: off
    quantization  "none", "int8" (QK), "int8-fp8" (QK, PV), or "auto": what suits the device
    block         (query rows, keys) of one block of the mask
    sinks         how many leading key blocks are always kept
    protected     token ranges (start, stop) always computed in full, as keys and as queries;
                  negative positions count from the end, a stop of None is the end
    max_error     relative L1 error that no head may exceed, estimated in each call from a few rows
                  computed exactly; heads that might are computed anew, all of it. None: no check

    >>> SparseConfig(rule="topk", topk=0.3).rule
    ('topk',)
    """

    rule: str | tuple[str, ...] = ("gap", "probe")
    threshold: PerHead = 0.003
    gap: PerHead = 4.0
    cdf: PerHead = 0.97
    topk: PerHead = 0.5
    probe: PerHead = 0.003
    probe_rows: int = 4
    subblocks: tuple[int, int] = (4, 4)
    similarity: PerHead | None = None
    pv_threshold: PerHead | None = None
    quantization: str = "auto"
    block: tuple[int, int] = (128, 64)
    sinks: int = 1
    protected: tuple[tuple[int, int | None], ...] = ()
    max_error: float | None = None

    encoded: ClassVar[str]  # the settings as JSON, set on each instance

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "rule", _rules(self.rule))
        for name in RULES:
            put(self, name, _numbers(name, getattr(self, name), 0, math.inf if name == "gap" else 1))
            self._refuse_unused(name, name)
        if self.probe_rows not in PROBE_ROWS or not _is_int(self.probe_rows):
            raise ValueError(f"probe_rows must be one of {PROBE_ROWS}, not {self.probe_rows!r}.")
        self._refuse_unused("probe_rows", "probe")
        if self.similarity is not None:
            put(self, "similarity", _numbers("similarity", self.similarity, -1, 1))
        if self.pv_threshold is not None:
            put(
                self,
                "pv_threshold",
                _numbers("pv_threshold", self.pv_threshold, -math.inf, 0, open_high=True),
            )
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {QUANTIZATIONS}, not {self.quantization!r}.")
        put(self, "block", _pair("block", self.block, BLOCK_ROWS, BLOCK_KEYS))
        put(self, "subblocks", _pair("subblocks", self.subblocks, SUBBLOCKS, SUBBLOCKS))
        if not _is_int(self.sinks) or self.sinks < 0:
            raise ValueError(f"sinks must be a number of key blocks, 0 or more, not {self.sinks!r}.")
        put(self, "protected", _ranges(self.protected))
        if self.max_error is not None:
            put(self, "max_error", _positive("max_error", self.max_error))
        put(self, "encoded", json.dumps({field.name: getattr(self, field.name) for field in fields(self)}))

    def __hash__(self) -> int:
        return hash(self.encoded)  # which a string remembers; a call asks for it several times

    def _refuse_unused(self, name: str, rule: str) -> None:
        default = next(field.default for field in fields(self) if field.name == name)
        if rule not in self.rule and getattr(self, name) != default:
            raise ValueError(
                f"{name}={getattr(self, name)!r} would be ignored: rule={self.rule!r} does not name {rule!r}; "
                f"add it to rule, or leave {name} out."
            )

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> SparseConfig:
        """From all settings by name, as `encoded` has them; what no rule uses may be the default of another version."""
        rule = settings.get("rule", cls.rule)
        names = (rule,) if isinstance(rule, str) else rule
        if not isinstance(names, (tuple, list)):
            return cls(**settings)  # which refuses it
        unused = {name for name, its_rule in RULE_OF.items() if its_rule not in names}
        return cls(**{name: value for name, value in settings.items() if name not in unused})

    @functools.cached_property
    def keeps_everything(self) -> bool:
        """Whether the rules keep every visible block whatever the scores are."""
        certain = {"threshold": 0.0, "gap": math.inf, "cdf": 1.0, "topk": 1.0}
        return any(name in self.rule and getattr(self, name) == value for name, value in certain.items())

    def check_heads(self, heads: int) -> None:
        """Raise unless every per-head setting has one value per query head."""
        for name in (*RULES, "similarity", "pv_threshold"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != heads:
                raise ValueError(
                    f"{name} has {len(value)} values but query has {heads} heads; "
                    "give one number, or one per query head."
                )

    def per_head(self, name: str, heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A selection setting as a tensor [heads]."""
        value = getattr(self, name)
        values = value if isinstance(value, tuple) else (value,) * heads
        return torch.tensor(values, dtype=dtype, device=device)

    def protected_ranges(self, length: int) -> list[tuple[int, int]]:
        """The protected ranges inside a sequence of this length, ends resolved."""
        return [slice(start, stop).indices(length)[:2] for start, stop in self.protected]


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _rules(rule: object) -> tuple[str, ...]:
    names = (rule,) if isinstance(rule, str) else rule
    if not isinstance(names, (tuple, list)) or not names or any(name not in RULES for name in names):
        raise ValueError(f"rule must be one of {RULES} or a tuple of them, not {rule!r}.")
    return tuple(dict.fromkeys(names))


def _numbers(name: str, value: object, low: float, high: float, open_high: bool = False) -> PerHead:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    single = not isinstance(value, Sequence) or isinstance(value, str)
    values: tuple[Any, ...] = (value,) if single else tuple(value)  # type: ignore[arg-type]
    inside = f"from {low:g} to {'below ' if open_high else ''}{high:g}"
    for number in values:
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"{name} must be a number {inside}, or one per query head, not {value!r}.")
        if not low <= _as_float(number) <= high or (open_high and number == high):  # NaN fails every comparison
            raise ValueError(f"{name} must lie {inside}, not {number!r:.40}.")
    if not values:
        raise ValueError(f"{name} must be a number or one per query head, not an empty sequence.")
    floats = tuple(map(_as_float, values))
    return floats[0] if single else floats


def _as_float(number: Any) -> float:
    """Integers that no float holds are infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number above 0, or None, not {value!r}.")
    if not 0 < _as_float(value) < math.inf:  # NaN fails too
        raise ValueError(f"{name} must lie above 0, not {value!r:.40}.")
    return _as_float(value)


def _pair(name: str, value: object, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or value[0] not in first or value[1] not in second:
        raise ValueError(f"{name} must be (rows, keys) with rows in {first} and keys in {second}, not {value!r}.")
    return int(value[0]), int(value[1])


def _ranges(value: object) -> tuple[tuple[int, int | None], ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"protected must be a tuple of (start, stop) token ranges, not {value!r}.")
    ranges = []
    for item in value:
        good = isinstance(item, (tuple, list)) and len(item) == 2 and _is_int(item[0])
        if not good or not (item[1] is None or _is_int(item[1])):
            raise TypeError(f"protected must be a tuple of (start, stop) token ranges, not {value!r}.")
        start, stop = item
        if (stop is not None and start >= stop and (start < 0) == (stop < 0)) or (stop == 0 and start < 0):
            raise ValueError(
                f"protected range ({start}, {stop}) holds no token; give start before stop, None for the end."
            )
        ranges.append((start, stop))
    return tuple(ranges)
