"""Settings from a command line: `gap=6,quantization=none` to a SparseConfig, and the device and number format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparge.config import SparseConfig
from sparge.evaluate.language import Variant
from sparge.profile import Profile

NUMBERS = ("threshold", "gap", "cdf", "topk", "probe", "similarity", "pv_threshold", "max_error")
PAIRS = ("block", "subblocks")
NAMES = ("rule", *NUMBERS, *PAIRS, "quantization", "sinks", "probe_rows")
DEFAULT = "default"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_config(text: str) -> SparseConfig:
    """Settings of SparseConfig by name, with commas between them; `default` stands for none.

    >>> parse_config("rule=topk+gap,topk=0.2,gap=4,block=128x64").rule
    ('topk', 'gap')
    """
    settings: dict[str, Any] = {}
    for part in text.split(",") if text != DEFAULT else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in NAMES:
            raise ValueError(f"--config {text}: expected NAME=VALUE with a name of {', '.join(NAMES)}, not {part!r}.")
        settings[name] = _value(text, name, value)
    return SparseConfig(**settings)


def _value(text: str, name: str, value: str) -> Any:
    try:
        if name in NUMBERS:
            return float(value)
        if name in PAIRS:
            return tuple(int(part) for part in value.split("x"))
        if name in ("sinks", "probe_rows"):
            return int(value)
    except ValueError as error:
        shape = "two numbers, as in 128x64" if name in PAIRS else "a number"
        raise ValueError(f"--config {text}: {name} is {shape}, not {value!r}.") from error
    return tuple(value.split("+")) if name == "rule" else value


def variants_of(configs: Sequence[str], profiles: Sequence[Path]) -> list[Variant]:
    """One for each config and each profile; the default config if there is none of either."""
    made = [Variant(text, parse_config(text)) for text in configs or (() if profiles else (DEFAULT,))]
    made += [Variant(path.stem, profile=Profile.load(path)) for path in profiles]
    names = [variant.name for variant in made]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"settings {double} are there twice.")
    return made


def parse_device(name: str | None) -> torch.device:
    """None: the GPU if there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, not {name}.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices.")
    return torch.device(name)


def parse_dtype(name: str | None) -> torch.dtype | None:
    """None: that of the model's file."""
    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {name}.")
    return None if name is None else DTYPES[name]


def parse_counts(option: str, text: str) -> list[int]:
    """Whole numbers above 0 with commas between them.

    >>> parse_counts("--tokens", "2048,4096")
    [2048, 4096]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{option} must be different whole numbers above 0, as in 4096 or 2048,4096, not {text}.")
    return [int(part) for part in parts]
