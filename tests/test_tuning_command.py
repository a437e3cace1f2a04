"""`sparge tune` and `sparge profile`: what they print and write, Ctrl-C, and one sentence when something is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import refused
from typer.testing import CliRunner

from sparge import Profile, SparseConfig, patch, tune
from sparge.cli import app
from sparge.tuning import command
from sparge.tuning.command import cut_windows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")
runner = CliRunner()
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def letters(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) % 64 for letter in text]}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with random weights in place of SmolLM2."""
    model = tiny_llama()
    monkeypatch.setattr(command, "_load", lambda path, dtype: ("tiny", model, letters))
    return model


def tuned(path: Path, *more: str) -> Any:
    return runner.invoke(app, ["tune", str(path), "--tokens", "384", "--inputs", "2", *more])


def test_tune_writes_a_profile_and_profile_shows_it(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tiny.safetensors"
    result = tuned(path)
    assert result.exit_code == 0, result.output
    assert list(path.parent.iterdir()) == [path]  # no journal is left
    profile = Profile.load(path)
    assert list(profile.layers) == LAYERS
    assert profile.layers[LAYERS[0]].heads == 4
    assert tiny.config._attn_implementation == "sdpa"  # as it was
    shown = runner.invoke(app, ["profile", str(path)])
    assert shown.exit_code == 0
    assert shown.output.strip() == str(profile)
    assert str(profile) in result.output


def test_tune_as_json(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    result = tuned(path, "--json", "--spend", "head", "--config", "rule=cdf", "--l1", "0.1", "--l2", "0.2")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["metrics"]["l2"] == 0.2
    assert facts["base"]["rule"] == ["cdf"]
    assert set(facts["layers"][LAYERS[0]]) == {"cdf", "pv_threshold", "executed", "error"}
    assert max(facts["layers"][LAYERS[1]]["error"]) <= 0.2
    shown = json.loads(runner.invoke(app, ["profile", str(path), "--json"]).output)
    assert shown == {key: facts[key] for key in shown}


def test_tune_by_what_the_model_predicts(tiny: Any, tmp_path: Path) -> None:
    settings = "rule=threshold+gap,gap=0.01,threshold=0.3,sinks=0,quantization=none"
    path = tmp_path / "tiny.safetensors"
    result = tuned(path, "--json", "--config", settings)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)["metrics"]
    assert 0 < metrics["divergence"] <= metrics["allowed"]
    assert metrics["executed"] < 1
    assert tiny.config._attn_implementation == "sdpa"  # as it was


def test_divergence_is_that_of_the_predictions(tiny: Any) -> None:
    ids = torch.randint(0, 64, (2, 384), generator=torch.Generator().manual_seed(0))
    config = SparseConfig(rule=("threshold", "gap"), gap=0.01, threshold=0.3, sinks=0, quantization="none")
    found = tune(tiny, [ids], spend="prediction", config=config, share=1.0)
    with torch.no_grad():
        dense = tiny(ids).logits.log_softmax(-1)
        with patch(tiny, config):
            other = tiny(ids).logits.log_softmax(-1)
    kl = (dense.exp() * (dense - other)).sum(-1).mean()
    assert found.metrics["allowed"] == pytest.approx(float(kl), rel=0.01)


def test_ctrl_c_keeps_what_was_measured(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.safetensors"
    real, steps = command.tune, []

    def stopped(*args: Any, on_step: Any, **kwargs: Any) -> Profile:
        def stop(stage: str, layer: str) -> None:
            steps.append(layer)
            if steps.count(LAYERS[1]) == 1:
                raise KeyboardInterrupt

        return real(*args, on_step=stop, **kwargs)

    monkeypatch.setattr(command, "tune", stopped)
    result = tuned(path)
    assert result.exit_code == 130
    assert "goes on from there" in result.output
    assert not path.exists()
    journal = tmp_path / "tiny.safetensors.journal"
    assert journal.exists()
    before = len(journal.read_text().splitlines())
    assert before > 2
    monkeypatch.setattr(command, "tune", real)
    assert tuned(path).exit_code == 0
    assert not journal.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--l1", "2"], "l1"),
        (["--l1", "0.1", "--l2", "0.05"], "more than l1"),
        (["--spend", "nowhere"], "spend"),
        (["--config", "rule=random"], "rule"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--spend", "prediction", "--l1", "0.1"], "divergence instead"),
        (["--spend", "head", "--divergence", "0.1"], "spend='prediction'"),
        (["--text", "no such file"], "no such file"),
        (["--tokens", "1024", "--inputs", "1000"], "windows"),
        (["--tokens", "2048"], "at most 1024"),
    ],
)
def test_a_wrong_option_is_one_sentence(tiny: Any, tmp_path: Path, options: list[str], words: str) -> None:
    result = tuned(tmp_path / "x", *options)
    assert result.exit_code == 1
    assert str(result.exception).startswith("sparge tune: ")
    assert words in str(result.exception)
    assert not (tmp_path / "x").exists()


def test_a_model_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = tuned(tmp_path / "x", "--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "no folder" in str(result.exception)


def test_without_its_extra_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    assert "sparge[demo]" in str(tuned(tmp_path / "x").exception)


def test_profile_refuses_other_files(tmp_path: Path) -> None:
    for content in (None, b"", b"not a profile"):
        if content is not None:
            (tmp_path / "x").write_bytes(content)
        result = runner.invoke(app, ["profile", str(tmp_path / "x")])
        assert result.exit_code == 1
        assert str(result.exception).startswith("sparge profile: ")


def test_windows_are_spread_over_the_texts() -> None:
    first, second = list(range(100)), list(range(1000, 1100))
    windows = cut_windows([first, second], 10, 5)
    assert [window[0, 0].item() for window in windows] == [0, 30, 60, 1000, 1050]
    assert all(window.shape == (1, 10) for window in windows)
    with refused(ValueError, "text 2", "1 windows"):
        cut_windows([first, second[:15]], 10, 4)


def test_a_sliding_window_is_tuned_as_one() -> None:
    """Mistral's layers see 100 tokens; what `attend` gives must be what the model computes by itself."""
    from sparge.tuning.subjects import TransformersSubject

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=100, max_position_embeddings=1024,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(64, (1, 300))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        subject, seen = TransformersSubject(model, None, None), []

        def attend(layer: str, *tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
            from sparge.tuning.subjects import differentiable_attention

            seen.append((layer, arguments["window"]))
            return differentiable_attention(*tensors, **arguments)

        with subject._using(attend):
            got = model(ids, use_cache=False).logits
        subject.close()
    assert seen == [("model.layers.0.self_attn", (99, 0))]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
