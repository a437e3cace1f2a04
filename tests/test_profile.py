"""Profiles: what is saved comes back, layer names match exactly, and no file but a whole profile is taken."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from problems import refused, tensors
from safetensors.torch import save_file

from sparge import Profile, SparseConfig, attention
from sparge.profile import MAX_FILE, VERSION, LayerProfile, ProfileError

BASE = SparseConfig(sinks=2, block=(64, 64), protected=((0, 5), (-3, None)), quantization="none")


def made(**changes: object) -> Profile:
    settings = {"probe": (0.001, 0.1 + 0.2), "gap": (5.0, 0.0)}
    layers = {name: LayerProfile(settings, (0.25, 0.5), (0.01, 0.02)) for name in ("layers.1", "layers.11")}
    facts = {"model": "tiny", "base": BASE, "layers": layers, "metrics": {"l1": 0.05}, "versions": {"sparge": "0"}}
    return Profile(**{**facts, **changes})  # type: ignore[arg-type]


def rewritten(path: Path, metadata: dict[str, str] | None = None, **changes: object) -> Path:
    """A saved profile with some of its JSON facts or of its metadata replaced."""
    facts = {**json.loads(made()._facts()), **changes}
    vectors = [layer.vectors() for layer in made().layers.values()]
    parts = {
        f"{i}.{k}": torch.tensor(v, dtype=torch.float64) for i, layer in enumerate(vectors) for k, v in layer.items()
    }
    base = {"format": "sparge-profile", "version": str(VERSION), "profile": json.dumps(facts)}
    save_file(parts, path, metadata=base | (metadata or {}))
    return path


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    profile = made()
    profile.save(tmp_path / "p.safetensors")
    assert Profile.load(tmp_path / "p.safetensors") == profile
    assert Profile.load(str(tmp_path / "p.safetensors")).config_for("layers.1") == profile.config_for("layers.1")
    assert os.listdir(tmp_path) == ["p.safetensors"]


def test_a_config_of_a_profile_runs() -> None:
    q, k, v = tensors(q_len=300)
    config = made().config_for("layers.11")
    assert (config.gap, config.sinks, config.protected) == ((5.0, 0.0), 2, ((0, 5), (-3, None)))
    assert attention(q, k, v, config=config).shape == q.shape


def test_layer_names_match_exactly() -> None:
    for name in ("layers", "layers.1 ", "ayers.1", "layers.111", ""):
        with refused(ProfileError, "no layer", "layers.1"):
            made().config_for(name)


def test_a_profile_cannot_be_changed() -> None:
    profile = made()
    with pytest.raises(TypeError):
        profile.layers["layers.2"] = profile.layers["layers.1"]  # type: ignore[index]
    with pytest.raises(TypeError):
        profile.layers["layers.1"].settings["gap"] = (1.0, 1.0)  # type: ignore[index]


def test_settings_that_no_rule_uses_may_be_the_defaults_of_another_version(tmp_path: Path) -> None:
    base = {**json.loads(made()._facts())["base"], "topk": 0.123, "cdf": 0.456}
    assert Profile.load(rewritten(tmp_path / "p.safetensors", base=base)) == made()


def test_the_rule_probe_of_the_first_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="meant before"):
        Profile.load(rewritten(tmp_path / "p.safetensors", metadata={"version": "1"}))


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "examples").glob("**/*-profile.safetensors")))
def test_the_profiles_of_the_examples_load(path: Path) -> None:
    assert Profile.load(path).layers


def test_shown_as_text() -> None:
    shown = str(made())
    for words in (
        "tiny: 2 layers, 4 heads, 37.5%",
        "blocks of 64 x 64",
        "layers.11: probe 0.001 to 0.3",
        "l1 0.05",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": {}}, "1 to"),
        ({"model": ""}, "printable"),
        ({"model": "\x1b[2J"}, "printable"),
        ({"metrics": {"l1": float("nan")}}, "finite"),
        ({"base": SparseConfig(rule="topk")}, "layers.1"),  # threshold would be ignored
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    with refused(ProfileError, words):
        made(**changes)


@pytest.mark.parametrize(
    ("settings", "executed", "error", "words"),
    [
        ({}, (0.1,), (0.1,), "settings"),
        ({"sinks": (1.0,)}, (0.1,), (0.1,), "settings"),
        ({"gap": (1.0, 2.0)}, (0.1,), (0.1,), "gap"),
        ({"gap": (1.0,)}, (0.1,), (0.1, 0.1), "error"),
        ({"gap": (float("inf"),)}, (0.1,), (0.1,), "finite"),
        ({"gap": (1.0,)}, (1.1,), (0.1,), "0 to 1"),
        ({"gap": (1.0,)}, (1.0,), (-0.1,), "negative"),
    ],
)
def test_a_layer_that_makes_no_sense_is_refused(settings, executed, error, words: str) -> None:
    with refused(ProfileError, words):
        LayerProfile(settings, executed, error)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    made().save(whole)
    data = whole.read_bytes()
    for length in range(0, len(data), 7):
        cut.write_bytes(data[:length])
        with refused(ProfileError, "truncated"):
            Profile.load(cut)


def test_every_broken_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """A flipped byte gives a ProfileError or a valid profile, never another exception."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    made().save(whole)
    data = whole.read_bytes()
    refusals = []
    for place in range(len(data)):
        broken.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            Profile.load(broken).config_for("layers.1")
        except ProfileError as error:
            refusals.append(str(error))
    assert len(refusals) > len(data) // 4
    assert not any("\n" in refusal for refusal in refusals)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with refused(ProfileError, "no such file"):
        Profile.load(path)
    with refused(ProfileError, "no such file"):
        Profile.load(tmp_path)
    path.write_bytes(pickle.dumps(made().model))
    with refused(ProfileError, "truncated, or not"):
        Profile.load(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")  # a header that claims to be huge
    with refused(ProfileError, "truncated, or not"):
        Profile.load(path)
    with path.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with refused(ProfileError, "more than a profile"):
        Profile.load(path)
    save_file({"q": torch.zeros(1)}, path)
    with refused(ProfileError, "not a sparge profile"):
        Profile.load(path)


def test_a_newer_file_asks_for_an_upgrade(tmp_path: Path) -> None:
    with refused(ProfileError, "upgrade", str(VERSION + 1)):
        Profile.load(rewritten(tmp_path / "x", {"version": str(VERSION + 1), "more": "unknown"}))
    for version in ("", "1.0", "-1", "0", "²", "9" * 5000):
        with refused(ProfileError, "version"):
            Profile.load(rewritten(tmp_path / "x", {"version": version}))


LAYERS = json.loads(made()._facts())["layers"]


@pytest.mark.parametrize(
    ("metadata", "changes", "words"),
    [
        ({"profile": "{"}, {}, "JSON"),
        ({"profile": "[" * 100_000}, {}, "JSON"),
        ({"profile": "[]"}, {}, "model"),
        ({"profile": '{"model": NaN}'}, {}, "NaN"),
        ({"code": "import os"}, {}, "nothing else"),
        ({}, {"surprise": 1}, "nothing else"),
        ({}, {"layers": "layers.1"}, "list"),
        ({}, {"layers": LAYERS[:1]}, "belong to no layer"),
        ({}, {"layers": [*LAYERS, {"name": "third", "settings": ["gap"]}]}, "missing"),
        ({}, {"layers": [LAYERS[0], LAYERS[0]]}, "name"),
        ({}, {"layers": [{"name": "a", "settings": ["__class__"]}]}, "does not know"),
        ({}, {"layers": [{"name": "a", "settings": ["gap", "gap"]}]}, "does not know"),
        ({}, {"layers": [{"name": 7, "settings": ["gap"]}]}, "name"),
        ({}, {"layers": [{**LAYERS[0], "more": 1}]}, "nothing else"),
        ({}, {"base": {}}, "base"),
        ({}, {"base": {**json.loads(BASE.encoded), "block": [1, 1]}}, "block"),
        ({}, {"base": {**json.loads(BASE.encoded), "sinks": -1}}, "sinks"),
        ({}, {"metrics": []}, "metrics"),
        ({}, {"metrics": {"l1": "low"}}, "l1"),
        ({}, {"versions": {"torch": 2}}, "printable"),
        ({}, {"model": "\x1b]0;title\x07"}, "printable"),
        ({}, {"model": None}, "printable"),
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, metadata, changes, words: str) -> None:
    with refused(ProfileError, "cannot be used", words):
        Profile.load(rewritten(tmp_path / "x", metadata, **changes))


@pytest.mark.parametrize(
    "vector",
    [
        torch.zeros(2),  # float32
        torch.zeros(2, 1, dtype=torch.float64),
        torch.zeros(0, dtype=torch.float64),
        torch.zeros(5000, dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([1.0, torch.nan], dtype=torch.float64),
        torch.tensor([1.0, -2.0], dtype=torch.float64),  # a gap cannot be negative
    ],
)
def test_hostile_tensors_are_refused(tmp_path: Path, vector: torch.Tensor) -> None:
    from safetensors.torch import load_file

    parts = load_file(rewritten(tmp_path / "x"))
    facts = {"format": "sparge-profile", "version": str(VERSION), "profile": made()._facts()}
    save_file({**parts, "0.gap": vector}, tmp_path / "x", metadata=facts)
    with refused(ProfileError, "gap"):
        Profile.load(tmp_path / "x")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.safetensors"
    made().save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        made(model="another").save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.safetensors"]


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_no_float_holds_are_refused(tmp_path: Path, sign: int) -> None:
    with refused(ProfileError, "finite number"):
        Profile.load(rewritten(tmp_path / "p.safetensors", metrics={"a": sign * 10**400}))


def test_an_infinite_setting_is_not_saved(tmp_path: Path) -> None:
    layer = LayerProfile({"gap": (5.0,)}, (0.25,), (0.01,))
    base = SparseConfig(rule="gap", gap=float("inf"), quantization="none")
    with refused(ProfileError, "infinite"):
        Profile("tiny", base, {"layers.1": layer}).save(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())
