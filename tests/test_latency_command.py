"""`sparge bench-models` from the command line, at toy sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_latency import SMALL
from typer.testing import CliRunner

from sparge.bench.results import MEASURED, NOT_RUN, WRONG
from sparge.cli import app
from sparge.latency import command
from sparge.latency.cli import bench_models
from sparge.latency.results import Results, Row

pytest.importorskip("transformers")
runner = CliRunner()
pytestmark = pytest.mark.usefixtures("one_thread")
LLAMAS = ("llama-24k", "llama-128k")


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MODELS", tuple(SMALL.values()))


def run(*options: str):
    return runner.invoke(app, ["bench-models", "--device", "cpu", *options])


def test_a_run_prints_and_writes_everything(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run("--models", "llama-128k, llama-24k", "--out", str(folder))
    assert result.exit_code == 0, result.output
    results = Results.from_json((folder / "models.json").read_text())
    assert [row.name for row in results.rows] == ["llama-128k", "llama-24k"]
    assert {row.outcome for row in results.rows} == {MEASURED}
    assert results.settings == {"device": "cpu", "dtype": "float32", "steps": 3, "quantization": "none"}
    assert results.versions["transformers"]
    text = (folder / "models.md").read_text()
    assert "| Llama-3.1-8B, 24K tokens | 2 x 640 tokens, 4/2 heads of 16, causal |" in text
    assert "1.54x on RTX 4090, 35.7% skipped" in text
    assert "that Amdahl allows" in result.output


def test_json_is_all_that_is_printed() -> None:
    result = run("--models", "llama-24k", "--steps", "4", "--json")
    (row,) = Results.from_json(result.stdout).rows
    assert row.times is not None
    assert len(row.times.dense_steps) == 4


def test_results_are_written_after_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model, settings, on_stage):
        if model.name == LLAMAS[1]:
            assert len(Results.from_json((tmp_path / "models.json").read_text()).rows) == 1
            raise KeyboardInterrupt
        return Row.of(model, NOT_RUN, "as told.")

    monkeypatch.setattr(command, "measure", measured)
    result = run("--models", ",".join(LLAMAS), "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted after 1 models" in result.output
    assert Results.from_json((tmp_path / "models.json").read_text()).interrupted
    assert "interrupted" in (tmp_path / "models.md").read_text()


def test_no_model_is_begun_after_the_minutes(tmp_path: Path) -> None:
    result = run("--models", ",".join(LLAMAS), "--minutes", "0", "--out", str(tmp_path))
    assert result.exit_code == 0
    rows = Results.from_json((tmp_path / "models.json").read_text()).rows
    assert [row.outcome for row in rows] == [NOT_RUN, NOT_RUN]
    assert "the 0 minutes of --minutes were over before it." in result.output


def test_a_wrong_model_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure", lambda model, *_: Row.of(model, WRONG, "it is off."))
    result = run("--models", "flux")
    assert result.exit_code == 1
    assert "Flux, 1024 x 1024: wrong, no time: it is off." in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--models", "llama-24k,gpt"], "--models must be of "),
        (["--quantization", "int4"], "--quantization must be one of auto, none, int8, int8-fp8, not int4."),
        (["--device", "abacus"], "--device must be cpu, cuda or cuda:N, not abacus."),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be written"),
    ],
)
def test_options_that_cannot_be_followed(options: list[str], said: str) -> None:
    result = run(*options)
    assert result.exit_code == 1
    assert said in result.output


def test_without_a_gpu_the_device_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    result = runner.invoke(app, ["bench-models"])
    assert result.exit_code == 1
    assert "models of true size need a GPU" in result.output


def test_the_help_names_every_model() -> None:
    help_of_models = str(bench_models.__annotations__["models"])
    assert all(name in help_of_models for name in SMALL)
