"""Profile: tuned settings per layer and head, kept in one safetensors file. Nothing in a file is ever executed.

The file holds one float64 vector per layer and setting, and JSON metadata: the model, the settings that all layers
share, the layer names in order, versions and metrics. A file that is not exactly that is refused as a whole.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparge.config import SparseConfig

FORMAT = "sparge-profile"
VERSION = 2
OTHER_PROBE = 1  # the version whose rule "probe" meant something else
SETTINGS = ("threshold", "gap", "cdf", "topk", "probe", "similarity", "pv_threshold")
MEASURES = ("executed", "error")  # per head, on the inputs it was tuned with
MAX_FILE, MAX_HEADER = 64 << 20, 8 << 20  # bytes, checked before anything is read
MAX_LAYERS, MAX_HEADS, MAX_NAME = 10_000, 4_096, 500

Vector = tuple[float, ...]


class ProfileError(ValueError):
    """A profile that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class LayerProfile:
    """One layer: a vector per tuned setting, and what was measured with it; one number per query head each."""

    settings: Mapping[str, Vector]
    executed: Vector  # share of visible blocks computed
    error: Vector  # relative L1 of the head's output against exact attention

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))
        unknown = set(self.settings) - set(SETTINGS)
        if unknown or not self.settings:
            raise ProfileError(f"a layer's settings must be some of {SETTINGS}, not {sorted(self.settings)}.")
        heads = len(self.executed)
        for name, vector in self.vectors().items():
            if len(vector) != heads or not 1 <= heads <= MAX_HEADS:
                raise ProfileError(f"{name} has {len(vector)} values where executed has {heads}; both are per head.")
            if not all(math.isfinite(value) for value in vector):
                raise ProfileError(f"{name} holds numbers that are not finite.")
        if min(*self.executed, *self.error) < 0 or max(self.executed) > 1:
            raise ProfileError("executed must lie from 0 to 1, and error must not be negative.")

    @property
    def heads(self) -> int:
        return len(self.executed)

    def vectors(self) -> dict[str, Vector]:
        return {**self.settings, "executed": self.executed, "error": self.error}


@dataclass(frozen=True)
class Profile:
    """Tuned settings of a model: what all layers share, and per-head vectors by exact layer name.

    >>> layer = LayerProfile({"gap": (5.0, 3.5)}, executed=(0.4, 0.2), error=(0.02, 0.03))
    >>> profile = Profile("a model", SparseConfig(rule="gap"), {"layers.0": layer})
    >>> profile.config_for("layers.0").gap
    (5.0, 3.5)
    """

    model: str
    base: SparseConfig
    layers: Mapping[str, LayerProfile]
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "metrics", "versions"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ProfileError(f"a profile holds 1 to {MAX_LAYERS} layers, not {len(self.layers)}.")
        for text in (self.model, *self.layers, *self.metrics, *self.versions, *self.versions.values()):
            check_name(text)
        for name, value in self.metrics.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not -sys.float_info.max <= value <= sys.float_info.max:  # NaN fails too
                raise ProfileError(f"metric {name} must be a finite number, not {value!r:.40}.")
        for name in self.layers:
            try:
                self.config_for(name)
            except (TypeError, ValueError) as error:
                raise ProfileError(f"layer {name!r}: {error}") from error

    def config_for(self, layer: str) -> SparseConfig:
        """The settings of the layer of exactly this name."""
        if layer not in self.layers:
            raise ProfileError(
                f"the profile of {self.model} has no layer {layer!r}; it has {len(self.layers)}, "
                f"the first of them {next(iter(self.layers))!r}."
            )
        settings: dict[str, Any] = dict(self.layers[layer].settings)
        return replace(self.base, **settings)

    @property
    def executed(self) -> float:
        """Share of visible blocks computed on the inputs it was tuned with, all heads and layers alike."""
        shares = [share for layer in self.layers.values() for share in layer.executed]
        return sum(shares) / len(shares)

    # ---- to and from files

    def save(self, path: str | Path) -> None:
        """Written beside the target first and then renamed: a file of this name is always a whole one."""
        from safetensors.torch import save

        path = Path(path)
        tensors = {
            f"{index}.{name}": torch.tensor(vector, dtype=torch.float64)
            for index, layer in enumerate(self.layers.values())
            for name, vector in layer.vectors().items()
        }
        data = save(tensors, metadata={"format": FORMAT, "version": str(VERSION), "profile": self._facts()})
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(part, 0o644)  # mkstemp's files are the owner's alone
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    def _facts(self) -> str:
        layers = [{"name": name, "settings": list(layer.settings)} for name, layer in self.layers.items()]
        facts = {
            "model": self.model,
            "base": json.loads(self.base.encoded),
            "layers": layers,
            "metrics": dict(self.metrics),
            "versions": dict(self.versions),
        }
        try:
            return json.dumps(facts, allow_nan=False)
        except ValueError as error:
            raise ProfileError(
                "a setting of its base is infinite, which a file does not hold: name a number."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises ProfileError, in one sentence, for anything but a whole profile of a version this sparge reads."""
        path = Path(path)
        try:
            metadata, tensors = _read(path)
            return _profile(metadata, tensors)
        except ProfileError as error:
            raise ProfileError(f"{path} cannot be used: {error}") from error

    # ---- to look at

    def __str__(self) -> str:
        heads = sum(layer.heads for layer in self.layers.values())
        lines = [
            f"{self.model}: {len(self.layers)} layers, {heads} heads, {self.executed:.1%} of visible blocks computed",
            f"rule {' or '.join(self.base.rule)}, blocks of {self.base.block[0]} x {self.base.block[1]}, "
            f"{self.base.sinks} sink blocks, quantization {self.base.quantization}",
        ]
        if self.metrics:
            lines.append(", ".join(f"{name} {value:g}" for name, value in self.metrics.items()))
        if self.versions:
            lines.append(", ".join(f"{name} {value}" for name, value in self.versions.items()))
        for name, layer in self.layers.items():
            spans = (f"{key} {min(vector):.4g} to {max(vector):.4g}" for key, vector in layer.vectors().items())
            lines.append(f"{name}: {', '.join(spans)}")
        return "\n".join(lines)


def check_name(text: object) -> None:
    """Of a model, layer, metric or package: it will be printed, so it may not steer a terminal."""
    if not isinstance(text, str) or not text.isprintable() or not 1 <= len(text) <= MAX_NAME:
        raise ProfileError(f"names must be 1 to {MAX_NAME} printable characters, not {str(text)[:40]!r}.")


# ---- reading what may have been written by anyone


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            raise ProfileError("there is no such file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ProfileError(f"{error.strerror}.") from error
    if size > MAX_FILE:
        raise ProfileError(f"{size} bytes are more than a profile may have ({MAX_FILE}).")
    if size < 8 or header > min(MAX_HEADER, size - 8):
        raise ProfileError("it is truncated, or not a safetensors file.")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            _check_version(metadata)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ProfileError("it is truncated, or not a safetensors file.") from error
    return metadata, tensors


def _check_version(metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ProfileError("it is a safetensors file, but not a sparge profile.")
    version = metadata.get("version", "")
    if not version.isascii() or not version.isdigit() or len(version) > 9 or int(version) < 1:
        raise ProfileError("its format version is not a number.")
    if int(version) > VERSION:
        raise ProfileError(f"its format is {version} and this sparge reads up to {VERSION}: upgrade sparge.")
    if set(metadata) != {"format", "version", "profile"}:
        raise ProfileError("its metadata must be format, version and profile, and nothing else.")


def _profile(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Profile:
    facts = _object(_json(metadata["profile"]), "its metadata", ("model", "base", "layers", "metrics", "versions"))
    base = _base(facts["base"])
    if int(metadata["version"]) <= OTHER_PROBE and "probe" in base.rule:
        raise ProfileError('it was made for what the rule "probe" meant before: tune again.')
    named = facts["layers"]
    if not isinstance(named, list) or len(named) > MAX_LAYERS:
        raise ProfileError(f"its layers must be a list of at most {MAX_LAYERS}.")
    layers: dict[str, LayerProfile] = {}
    left = dict(tensors)
    for index, entry in enumerate(named):
        layer = _object(entry, f"layer {index}", ("name", "settings"))
        name, settings = layer["name"], layer["settings"]
        if not isinstance(name, str) or name in layers:
            raise ProfileError(f"layer {index} has no name of its own.")
        if not isinstance(settings, list) or not all(isinstance(setting, str) for setting in settings):
            raise ProfileError(f"layer {index} must name its settings.")
        if len(set(settings)) != len(settings) or not set(settings) <= set(SETTINGS):
            raise ProfileError(f"layer {index} has settings that this sparge does not know.")
        vectors = {key: _vector(left, f"{index}.{key}") for key in (*settings, *MEASURES)}
        measures = {key: vectors.pop(key) for key in MEASURES}
        layers[name] = LayerProfile(vectors, **measures)
    if left:
        raise ProfileError(f"it holds {len(left)} tensors that belong to no layer.")
    for key in ("metrics", "versions"):
        if not isinstance(facts[key], dict):
            raise ProfileError(f"its {key} must be an object.")
    return Profile(facts["model"], base, layers, facts["metrics"], facts["versions"])


def _json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ProfileError(f"its metadata holds {constant}.")

    try:
        return json.loads(text, parse_constant=refuse)
    except ProfileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProfileError("its metadata is not JSON.") from error


def _object(value: Any, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ProfileError(f"{what} must hold {', '.join(keys)}, and nothing else.")
    return value


def _base(value: Any) -> SparseConfig:
    settings = _object(value, "its base", tuple(one.name for one in fields(SparseConfig)))
    tuples = {
        key: tuple(tuple(part) if isinstance(part, list) else part for part in item)
        for key, item in settings.items()
        if isinstance(item, list)
    }
    try:
        return SparseConfig.of_settings({**settings, **tuples})
    except (TypeError, ValueError) as error:
        raise ProfileError(f"its base: {error}") from error


def _vector(tensors: dict[str, Tensor], name: str) -> Vector:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ProfileError(f"the tensor {name} is missing.")
    if tensor.dtype != torch.float64 or tensor.dim() != 1 or not 1 <= len(tensor) <= MAX_HEADS:
        raise ProfileError(f"the tensor {name} must be float64 with 1 to {MAX_HEADS} values.")
    return tuple(tensor.tolist())
