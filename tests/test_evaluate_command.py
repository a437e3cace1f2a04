"""`sparge eval`: what it prints and writes, models in folders, Ctrl-C, and one sentence when something is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from copying_model import Words, copying_model, repetitive_text, transformers
from problems import refused
from small_models import built, llama
from typer.testing import CliRunner

from sparge import Profile, SparseConfig
from sparge.cli import app
from sparge.evaluate import command, language
from sparge.evaluate.models import LanguageModel, load_model
from sparge.evaluate.settings import parse_config
from sparge.profile import LayerProfile

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
DAMAGED = "rule=topk,topk=0.02,sinks=0,quantization=none,block=64x32"
runner = CliRunner()


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "made.txt"
    file.write_text(repetitive_text(), encoding="utf-8")
    return str(file)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that can look things up, in place of SmolLM2."""
    model = copying_model(1024)
    monkeypatch.setattr(command, "load_model", lambda path, dtype: LanguageModel("copies", model, Words()))
    return model


def run(*options: str) -> Any:
    return runner.invoke(app, ["eval", "--device", "cpu", *options])


def test_a_run_prints_tables_and_writes_files(copies: Any, text: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    tasks = [part for task in ("ppl", "needle", "multivalue", "tracking", "greedy") for part in ("--task", task)]
    result = run(
        *tasks, "--text", text, "--tokens", "384,512", "--keys", "1,2", "--depths", "2", "--windows", "1",
        "--new-tokens", "4", "--hops", "2", "--values", "2", "--config", "default", "--config", DAMAGED,
        "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "every call was left to dense attention" in result.output
    written = json.loads((out / "results.json").read_text())
    kinds = {(row["task"], row["tokens"], row["on"], row["variant"]) for row in written["rows"]}
    assert len(kinds) == len(written["rows"]) == 2 * 2 * 6
    assert ("needle", 384, "2 keys", DAMAGED) in kinds
    rows = [row for row in written["rows"] if row["variant"] == DAMAGED]
    assert all(0 < row["skipped"] < 1 for row in rows)
    assert any(row["lost"] for row in rows)
    assert written["machine"]["threads"] == 1
    assert written["texts"] == "made"
    shown = (out / "results.md").read_text()
    assert "| needle 512, 1 key |" in shown
    names = {"results.json", "results.md"}
    if importlib.util.find_spec("matplotlib") is not None:
        names |= {"ppl_by_position.png", "needles.png"}
    assert {file.name for file in out.iterdir()} == names  # and no journal


def test_json_is_all_that_is_printed(copies: Any, text: str) -> None:
    result = run("--task", "needle", "--text", text, "--tokens", "384", "--depths", "2", "--seed", "3", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"] == "copies"
    assert [row["cases"] for row in facts["rows"]] == [2]


def test_a_profile_is_judged_like_a_config(copies: Any, text: str, tmp_path: Path) -> None:
    base = SparseConfig(rule="topk", quantization="none", block=(64, 32), sinks=0)
    layer = LayerProfile({"topk": (0.02, 0.02)}, executed=(0.1, 0.1), error=(0.5, 0.5))
    path = tmp_path / "found.safetensors"
    Profile("copies", base, {"model.layers.1.self_attn": layer}).save(path)
    result = run(
        "--task", "needle", "--text", text, "--tokens", "768", "--depths", "4", "--profile", str(path), "--json"
    )
    facts = json.loads(result.stdout)
    assert facts["rows"][0]["variant"] == "found"
    assert facts["rows"][0]["lost"] > 0
    assert "1 of 2 attention layers sparse" in facts["plans"]["found"]
    assert any("will not be sparse" in note for note in facts["notes"])


def test_ctrl_c_keeps_what_was_done(copies: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, done = language._measure, []

    def until_two(*arguments: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(measure(*arguments))
        return done[-1]

    options = ("--task", "needle", "--text", text, "--tokens", "384", "--depths", "3", "--out", str(tmp_path / "out"))
    monkeypatch.setattr(language, "_measure", until_two)
    result = run(*options)
    assert result.exit_code == 130
    assert "Interrupted after 2 of 3 cases" in result.output
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["cases"]) == 2
    assert "interrupted" in (tmp_path / "out" / "results.md").read_text()
    done.clear()
    result = run(*options)  # one case is left
    assert result.exit_code == 0, result.output
    assert len(done) == 1
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["cases"]) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer as save_pretrained writes them."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, **{f"w{n}": n + 1 for n in range(60)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("models") / "tiny-1.5"
    built(llama).to(torch.bfloat16).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(path)
    return path


def test_a_model_in_a_folder_keeps_its_number_format_unless_told(folder: Path) -> None:
    loaded = load_model(folder)
    assert (loaded.name, loaded.model.dtype) == ("tiny-1.5", torch.bfloat16)
    assert not loaded.model.training
    assert load_model(folder, torch.float32).model.dtype == torch.float32


def test_a_model_in_a_folder_reads_twice_its_context_with_yarn(folder: Path, text: str) -> None:
    options = ("--model", str(folder), "--task", "ppl", "--text", text, "--tokens", "1100", "--windows", "1")
    result = run(*options)
    assert "reads at most 1024 tokens, not 1100" in str(result.exception)
    result = run(*options, "--yarn", "2", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run"] == "float32 on cpu, YaRN x2"


def test_other_gguf_files_are_one_sentence(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with refused(ValueError, "other.gguf holds no plain Llama model, but gemma3"):
        load_model(tmp_path / "other.gguf")
    for content in (b"", b"not a model" * 10):
        (tmp_path / "junk.gguf").write_bytes(content)
        with refused(ValueError, "junk.gguf is no GGUF file"):
            load_model(tmp_path / "junk.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "poetry"], "--task must be one of"),
        (["--text", "no such file"], "there is no text no such file"),
        (["--tokens", "many"], "--tokens must be"),
        (["--tokens", "512,512"], "--tokens must be different"),
        (["--task", "needle", "--tokens", "2048"], "reads at most 1024 tokens"),
        (["--tokens", "30"], "no room"),
        (["--keys", "0"], "--keys must be"),
        (["--task", "ppl", "--keys", "2"], "--keys is for needle"),
        (["--task", "needle", "--new-tokens", "2"], "--new-tokens is for greedy"),
        (["--config", "gap"], "expected NAME=VALUE"),
        (["--config", "gap=wide"], "gap is a number"),
        (["--config", "block=128"], "block must be (rows, keys)"),
        (["--config", "block=128xy"], "as in 128x64"),
        (["--config", "topk=0.3"], "would be ignored"),
        (["--config", "default", "--config", "default"], "there twice"),
        (["--profile", "no such profile"], "no such profile"),
        (["--yarn", "0.5"], "above 1"),
        (["--device", "tpu"], "--device must be"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--dtype", "int4"], "--dtype must be"),
        (["--windows", "1000"], "windows of 512 tokens"),
    ],
)
def test_a_wrong_option_is_one_sentence(copies: Any, text: str, options: list[str], words: str) -> None:
    given = ["--tokens", "512", "--text", text]
    given = [part for part in given if "--tokens" not in options or part not in ("--tokens", "512")]
    given = [part for part in given if "--text" not in options or part not in ("--text", text)]
    result = run(*given, *options)
    assert result.exit_code == 1
    assert str(result.exception).startswith("sparge eval: ")
    assert str(result.exception).endswith(".")
    assert words in str(result.exception)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no folder and no GGUF file" in str(run("--model", str(tmp_path / "none")).exception)


def test_without_its_extra_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    assert "sparge[eval]" in str(run().exception)


def test_settings_are_those_of_the_config() -> None:
    assert parse_config("default") == SparseConfig()
    want = SparseConfig(rule=("topk", "cdf"), topk=0.2, cdf=0.9, block=(64, 32), sinks=2, quantization="int8")
    assert parse_config("rule=topk+cdf, topk=0.2, cdf=0.9, block=64x32, sinks=2, quantization=int8") == want
