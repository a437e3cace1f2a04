"""Every example for one process runs as a user would run it, stays short, and prints what it says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from sparge.evaluate import models

FOLDER = Path(__file__).parent.parent / "examples"
LONGEST = 40  # lines
EXAMPLES = [path for path in sorted(FOLDER.glob("[!_]*.py")) if not path.name.startswith("context_parallel")]


@pytest.fixture(scope="module")
def loaded() -> Any:
    """A third of SmolLM2's layers, read from disk once for all examples: the rest would only take time."""
    pytest.importorskip("transformers")
    model, tokenizer = models.load_smollm2()
    model.model.layers = model.model.layers[:10]
    return model, tokenizer


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < LONGEST
    assert f"python examples/{path.name}" in text
    assert f"run({path.name!r}".replace("'", '"') in Path(__file__).read_text()  # and a test runs it


def test_custom_mask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_mask.py", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out.splitlines()[-3:]
    errors = {line.split()[0]: float(line.split()[-1]) for line in shown}
    assert errors["either"] <= min(errors["mine"], errors["predicted"])


def test_tuning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("tuning.py", str(tmp_path / "mine.safetensors"), monkeypatch=monkeypatch)
    assert (tmp_path / "mine.safetensors").exists()
    assert "layers.1: [" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_video(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    run("video.py", monkeypatch=monkeypatch)
    kept, half = capsys.readouterr().out.splitlines()[-2:]
    assert float(kept.split()[-1]) < 1e-4
    assert kept.startswith("everything kept: 0%")
    assert 10 < int(half.split("%")[0].split()[-1]) < 60


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_prefill(loaded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "load_smollm2", lambda: loaded)
    run("prefill.py", "2048", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert "2048 tokens" in shown
    assert float(shown.split("at ")[-1].split("%")[0]) > 90


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_chat_with_document(loaded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "load_smollm2", lambda: loaded)
    run("chat_with_document.py", "2304", "What does the pass statement do?", monkeypatch=monkeypatch)
    question, answer = capsys.readouterr().out.splitlines()[:2]
    assert question == "What does the pass statement do?"
    assert len(answer.split()) > 3
