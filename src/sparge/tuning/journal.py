"""What has been measured so far, one JSON line each: a search that was stopped goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge.tuning.measure import Measurement

MAX_BYTES = 256 << 20  # checked before anything is read
WEIGHTS_SEEN = 64  # of each tensor of a model


class JournalError(ValueError):
    """A journal that cannot be gone on with; the message is one sentence."""


class Journal:
    """Records by key, in memory and, with a path, in a file that grows by a line per record.

    Its first line names the job. A last line that was cut off is forgotten and measured again.
    """

    def __init__(self, path: Path | None, job: dict[str, Any]) -> None:
        self.path, self.records = path, dict[str, Any]()
        if path is None:
            return
        first = json.dumps({"sparge-journal": 3, **job}, sort_keys=True)
        if path.exists():
            self._read(path, first)
        whole = path.with_name(path.name + ".part")  # without a line that was cut off
        whole.write_text("".join(f"{line}\n" for line in (first, *map(_line, self.records.items()))))
        whole.replace(path)

    def _read(self, path: Path, first: str) -> None:
        if path.stat().st_size > MAX_BYTES:
            raise JournalError(f"{path} is larger than any journal; delete it or name another.")
        lines = path.read_text(errors="replace").splitlines()
        if lines and lines[0] != first:
            raise JournalError(
                f"{path} is no journal of this run (other model, inputs, settings or version); "
                "delete it or name another."
            )
        for number, line in enumerate(lines[1:], 2):
            try:
                key, value = json.loads(line)
                self.records[key] = value
            except (ValueError, TypeError, RecursionError) as error:
                if number < len(lines):
                    raise JournalError(f"{path} is damaged in line {number}; delete it or name another.") from error

    def add(self, key: str, value: Any) -> None:
        self.records[key] = value
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{_line((key, value))}\n")


def _line(record: tuple[str, Any]) -> str:
    return json.dumps(record)


def pack(measurement: Measurement) -> list[Any]:
    return [part.tolist() for part in measurement.parts()]


def unpack(value: Any, where: str) -> Measurement:
    """Checked: a journal is a file like any other."""
    try:
        parts = [torch.tensor(part, dtype=torch.float64) for part in value]
        heads, candidates = parts[0].shape[0], parts[3].shape[0]
        shapes = [(heads,)] * 3 + [(candidates, heads)] * 7
        good = [tuple(part.shape) for part in parts] == shapes and all(bool(part.isfinite().all()) for part in parts)
    except (TypeError, ValueError, IndexError, RuntimeError):
        good = False
    if not good:
        raise JournalError(f"the journal's record of {where} is damaged; delete the journal or name another.")
    return Measurement(*parts)


def fingerprint(model: Any) -> str:
    """Of a module's weights: their names, formats and sizes, and a few numbers of each. A function has none."""
    weights = model.state_dict() if isinstance(model, torch.nn.Module) else {}
    tensors = {name: x.detach().flatten() for name, x in weights.items() if isinstance(x, Tensor)}
    return digest([{name: (len(x), x[:: max(1, len(x) // WEIGHTS_SEEN)]) for name, x in tensors.items()}])


def digest(inputs: Iterable[Any]) -> str:
    """Of the tensors in the inputs, inside dicts and sequences too; of other things, only their type counts."""
    seen = hashlib.sha256()

    def visit(thing: Any) -> None:
        seen.update(type(thing).__name__.encode())
        if isinstance(thing, Tensor):
            seen.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            seen.update(thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, (str, int, float)):
            seen.update(repr(thing).encode())
        elif isinstance(thing, dict):
            for key, value in thing.items():
                visit(str(key))
                visit(value)
        elif isinstance(thing, (list, tuple)):
            for part in thing:
                visit(part)

    for item in inputs:
        visit(item)
    return seen.hexdigest()
