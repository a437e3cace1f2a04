"""What every search has: a model, inputs, and a journal of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparge.config import SparseConfig
from sparge.tuning.journal import Journal
from sparge.tuning.subjects import Subject

OnStep = Callable[[str, str], None]  # (stage, layer or "")


@dataclass(frozen=True)
class Search:
    """One search: what it runs, on what, and how it measures."""

    subject: Subject
    inputs: list[Any]
    base: SparseConfig
    share: float
    seed: int
    journal: Journal
    on_step: OnStep


def versions() -> dict[str, str]:
    from sparge import __version__

    return {"sparge": __version__, "torch": torch.__version__}
