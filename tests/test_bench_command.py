"""`sparge bench` and `sparge capture` from the command line, at tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sparge.backends.cpu.launch import CpuBackend
from sparge.backends.gather import GatherBackend
from sparge.bench import cases, run
from sparge.bench.cases import Case
from sparge.bench.results import MEASURED, Results
from sparge.cli import app

runner = CliRunner()
pytestmark = pytest.mark.usefixtures("one_thread")  # tiny problems: a second thread only waits
TINY = (
    Case(256, 64, quantization="none"),
    Case(512, 64, causal=True, sparsity=0.8, group=4, quantization="none"),
    Case(512, 64, mask="skewed", quantization="auto"),
)


@pytest.fixture(autouse=True)
def tiny_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.GRIDS, "quick", TINY)


def bench(*options: str):
    return runner.invoke(app, ["bench", "--grid", "quick", "--device", "cpu", *options])


def test_a_run_prints_and_writes_everything(tmp_path: Path) -> None:
    result = bench("--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    folder = tmp_path / "new" / "folder"
    results = Results.from_json((folder / "results.json").read_text())
    assert [row.outcome for row in results.rows] == [MEASURED] * len(TINY)
    assert [row.case.tokens for row in results.rows] == [256, 512, 512]
    assert not results.interrupted
    assert results.settings["heads"] == 4
    assert (folder / "table.md").read_text().count("**") >= 2 * len(TINY)
    assert (folder / "tflops_by_sparsity.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    for words in ("256 D64 full uniform 60% none", "group 4", "skewed", "cudnn: needs an NVIDIA GPU (3x)"):
        assert words in result.output


def test_json_is_all_that_is_printed() -> None:
    results = Results.from_json(bench("--json", "--heads", "8", "--block", "64,64", "--backend", "torch").stdout)
    assert len(results.rows) == len(TINY)
    assert {row.backend for row in results.rows} == {"torch"}
    assert (results.settings["heads"], results.settings["block"]) == (8, [64, 64])


def test_without_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *x: None if name == "matplotlib" else find(name, *x))
    result = bench("--out", str(tmp_path))
    assert result.exit_code == 0
    assert "need matplotlib" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.md"]


def test_a_wrong_result_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = GatherBackend.attend
    monkeypatch.setattr(
        GatherBackend, "attend", lambda self, *x: replace(attend(self, *x), values=torch.zeros_like(x[0].inputs.query))
    )
    result = bench("--backend", "torch", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "wrong, no speed" in result.output
    assert "sparge " not in result.output.split("Written")[0].replace("sparge bench", "")
    assert {row.outcome for row in Results.from_json((tmp_path / "results.json").read_text()).rows} == {"wrong"}


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = run.measure

    def interrupted(case: Case, settings):
        if case.mask == "skewed":
            raise KeyboardInterrupt
        return measure(case, settings)

    monkeypatch.setattr(run, "measure", interrupted)
    result = bench("--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted after 2 cases" in result.output
    results = Results.from_json((tmp_path / "results.json").read_text())
    assert results.interrupted
    assert [row.outcome for row in results.rows] == [MEASURED] * 2
    assert "interrupted" in (tmp_path / "table.md").read_text()


def test_ctrl_c_inside_a_kernel_is_not_taken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(GatherBackend, "attend", stopped)
    result = bench("--backend", "torch")
    assert result.exit_code == 130
    assert "Interrupted after 0 cases" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "fastest"], "--backend must be one of hopper, triton, cpu, torch, reference, not fastest."),
        (["--backend", "dense"], "--backend must be one of"),
        (["--grid", "huge"], "--grid must be one of quick, bars, full, cpu, not huge."),
        (["--device", "cuda:99"], "CUDA devices."),
        (["--device", "abacus"], "--device must be cpu, cuda or cuda:N, not abacus."),
        (["--device", "meta"], "--device must be"),
        (["--block", "100,64"], "(100, 64)"),
        (["--block", "128"], "ROWS,KEYS"),
        (["--without", "sleep"], "--without must be one of cudnn, flash, sdpa, flex, sage, not sleep."),
        (["--captured", "nowhere.safetensors"], "sparge capture nowhere.safetensors"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], said: str) -> None:
    result = bench(*options)
    assert result.exit_code == 1
    assert said in str(result.exception)
    assert str(result.exception).startswith("sparge bench: ")
    assert "\n" not in str(result.exception)


def test_a_backend_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "unavailable", lambda self: "its compiler is on holiday")
    result = bench("--backend", "cpu")
    assert result.exit_code == 1
    assert "its compiler is on holiday" in str(result.exception)


def test_an_unwritable_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        result = bench("--out", str(folder))
        assert result.exit_code == 1
        assert "cannot be written" in str(result.exception)


# ---- captured tensors


def write_captured(path: Path, kv_heads: int = 2, **changes: torch.Tensor) -> Path:
    tensors = {"q": torch.randn(4, 384, 64), "k": torch.randn(kv_heads, 384, 64), "v": torch.randn(kv_heads, 384, 64)}
    save_file(tensors | changes, path, metadata={"causal": "true", "source": "a test"})
    return path


def test_a_captured_file_is_measured_with_its_own_shape(tmp_path: Path) -> None:
    result = bench("--captured", str(write_captured(tmp_path / "x.safetensors")), "--json")
    assert result.exit_code == 0, result.output
    results = Results.from_json(result.stdout)
    row = results.rows[-1]
    assert (row.case.mask, row.case.tokens, row.case.causal, row.case.group, row.heads) == ("real", 384, True, 2, 4)
    assert row.outcome == MEASURED
    assert row.case.sparsity == row.skipped
    assert results.settings["captured"] == "a test"


@pytest.mark.parametrize(
    "changes",
    [{"v": torch.zeros(2, 100, 64)}, {"q": torch.zeros(3, 384, 64)}, {"k": torch.zeros(384, 64)}],
    ids=["length", "heads", "rank"],
)
def test_captured_files_of_another_shape_are_refused(tmp_path: Path, changes: dict[str, torch.Tensor]) -> None:
    result = bench("--captured", str(write_captured(tmp_path / "x.safetensors", **changes)))
    assert result.exit_code == 1
    assert "[H, N, D]" in str(result.exception)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a safetensors file")
    save_file({"q": torch.zeros(1)}, tmp_path / "lacking")
    for name, said in (("text", "not a safetensors file"), ("lacking", "lacks the tensors k, v")):
        result = bench("--captured", str(tmp_path / name))
        assert result.exit_code == 1
        assert said in str(result.exception)


def test_capture_without_its_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *x: None if name == "gguf" else find(name, *x))
    result = runner.invoke(app, ["capture", str(tmp_path / "x.safetensors")])
    assert result.exit_code == 1
    assert "sparge[demo]" in str(result.exception)


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_capture_on_the_real_model(tmp_path: Path) -> None:
    path = tmp_path / "smollm2.safetensors"
    result = runner.invoke(app, ["capture", str(path), "--tokens", "1024", "--layer", "1"])
    assert result.exit_code == 0, result.output
    row = Results.from_json(bench("--captured", str(path), "--json").stdout).rows[-1]
    assert (row.case.tokens, row.case.group, row.heads, row.outcome) == (1024, 3, 9, MEASURED)
    assert json.dumps(row.relative_l1) != "null"


def test_importing_sparge_does_not_import_the_benchmark() -> None:
    heavy = "{'matplotlib', 'typer', 'rich', 'sparge.bench', 'sparge.cli'}"
    code = f"import sys, sparge; found = {heavy} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
