"""`sparge report`: what it measures against brute force, what it refuses, and what it writes."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import EXACT, randn, tensors
from safetensors.torch import save_file
from typer.testing import CliRunner

import sparge
from sparge.cli import app
from sparge.evaluate import command as evaluation
from sparge.evaluate.models import LanguageModel
from sparge.inputs import prepare_inputs
from sparge.observe import observed
from sparge.report import command, inside
from sparge.report.findings import LayerFindings, look_at
from sparge.report.mass import FULL, INVISIBLE, exact_attention, picture, picture_side
from sparge.report.orders import drawn_order

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
FEW = "rule=topk,topk=0.3,subblocks=1x1,sinks=0,quantization=none,block=64x32"
CONFIG = sparge.SparseConfig(rule="topk", topk=0.3, subblocks=(1, 1), sinks=0, quantization="none", block=(64, 32))
runner = CliRunner()


def run(*options: str) -> Any:
    return runner.invoke(app, ["report", "--device", "cpu", *options])


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def looked_at(
    config: sparge.SparseConfig = CONFIG, contrast: float = 0.0, **arguments: Any
) -> tuple[LayerFindings, torch.Tensor]:
    q, k, v = tensors(heads=4, kv_heads=2, q_len=300, dim=32, contrast=contrast)
    found: list[LayerFindings] = []
    with observed(lambda run: found.append(look_at(run, "one", 64))):
        out = sparge.attention(q, k, v, enable_gqa=True, config=config, **arguments)
    exact = sparge.attention(q, k, v, enable_gqa=True, config=EXACT, **arguments)
    error = (out - exact).abs().sum((0, 2, 3)) / exact.abs().sum((0, 2, 3))
    return found[0], error


# ---- what is measured


@pytest.mark.parametrize("window", [None, (40, 0)])
def test_mass_is_the_softmax_summed_by_block(window: tuple[int, int] | None) -> None:
    q, k, v = (randn(seed, 2, 4 if seed == 0 else 2, 150, 16) for seed in range(3))
    inputs = prepare_inputs(q, k, v, is_causal=True, enable_gqa=True, window=window)
    exact = exact_attention(inputs, (64, 32))
    seen = inputs.visibility.pairs(range(150), range(150))
    weights = (inputs.scale * q @ k.repeat_interleave(2, 1).mT).masked_fill(~seen, -torch.inf).softmax(-1)
    assert torch.allclose(exact.values, weights @ v.repeat_interleave(2, 1), atol=1e-5)
    padded = torch.nn.functional.pad(weights, (0, 10, 0, 42))
    blocks = padded.unflatten(3, (5, 32)).unflatten(2, (3, 64)).sum((3, 5))
    assert torch.allclose(exact.mass, blocks, atol=1e-4)


def test_rows_that_see_nothing_have_no_mass() -> None:
    q, k = randn(0, 1, 1, 128, 16), randn(1, 1, 1, 64, 16)
    exact = exact_attention(prepare_inputs(q, k, k, is_causal=True), (64, 32))
    assert exact.mass[0, 0, 0].sum() == 0
    assert exact.mass[0, 0, 1].sum() == pytest.approx(64, rel=1e-5)
    assert exact.values.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_is_described_head_by_head(causal: bool) -> None:
    found, error = looked_at(is_causal=causal)
    assert found.error == pytest.approx(error.tolist(), rel=1e-3)
    assert all(0.3 < one < 0.8 for one in found.sparsity)
    assert all(0 < missed < skipped for missed, skipped in zip(found.missed, found.sparsity, strict=True))
    assert min(found.seconds.prediction, found.seconds.attention, found.seconds.dense) > 0
    assert found.seconds.quantization == 0
    assert (found.tokens, found.head_dim, len(found.pictures)) == ((300, 300), 32, 4)


def test_everything_kept_misses_nothing() -> None:
    found, _ = looked_at(EXACT)
    assert found.sparsity == [0, 0, 0, 0]
    assert max(found.missed) == 0
    assert max(found.error) < 1e-5


def test_heads_that_are_redone_count_as_kept() -> None:
    found, _ = looked_at(sparge.SparseConfig(rule="topk", topk=0.1, quantization="none", max_error=1e-6))
    assert max(found.missed) == 0
    assert found.sparsity == [0, 0, 0, 0]


def test_the_second_stage_is_told_apart() -> None:
    found, _ = looked_at(replace(EXACT, pv_threshold=-1.0), contrast=40.0)
    assert max(found.sparsity) == 0
    assert max(found.skipped_values) > 0


def test_a_picture_holds_shares_and_logarithms() -> None:
    kept = torch.tensor([[True, False, False, False], [True, True, False, True]])
    visible = torch.tensor([[True, True, False, False], [True, True, True, True]])
    mass = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.9]])
    whole = picture(kept, visible, mass, 4)
    data = base64.b64decode(str(whole["data"]))
    assert list(data[:8]) == [FULL, 0, INVISIBLE, INVISIBLE, FULL, FULL, 0, FULL]
    assert data[8] == 255
    assert data[9] == 0
    assert 10 ** ((data[12] - 1) / 254 * 6 - 6) == pytest.approx(0.1, rel=0.05)
    coarse = picture(kept, visible, mass, 2)
    assert (coarse["rows"], coarse["columns"]) == (2, 2)
    assert list(base64.b64decode(str(coarse["data"]))[:4]) == [127, INVISIBLE, FULL, 127]


def test_pictures_of_many_heads_are_coarser_and_stay_small() -> None:
    assert picture_side(270) == 64
    assert picture_side(1024) ** 2 * 2 * 4 / 3 * 1024 < 4.1e6
    assert picture_side(10**6) == 12


def test_a_fine_grid_is_drawn_coarser() -> None:
    assert drawn_order((2, 3, 4))["drawn"] == (2, 3, 4)
    drawn = drawn_order((64, 64, 64))
    assert sorted(drawn["path"]) == list(range(drawn["drawn"][0] ** 3))
    assert len(drawn["path"]) <= 20_000


# ---- captured tensors


@pytest.fixture
def captured(tmp_path: Path) -> str:
    made = {name: randn(seed, 2, 384, 32).cumsum(-2) / 8 for seed, name in enumerate("qkv")}
    save_file(made, tmp_path / "video.safetensors", metadata={"source": "</script><b>made</b>"})
    return str(tmp_path / "video.safetensors")


def test_captured_tensors_in_hilbert_order(captured: str, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    vision = tmp_path / "vision.json"
    row = {
        "settings": "default",
        "seeds": 4,
        "psnr": 31.25,
        "worst_psnr": None,
        "ssim": 0.99,
        "skipped": 0.5,
        "speedup": 2,
    }
    vision.write_text(json.dumps({"rows": [{**row, "by_seed": []}]}))
    result = run(
        str(page), "--captured", captured, "--grid", "4,8,12", "--config", FEW, "--vision", str(vision), "--json"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["file"] == str(page)
    assert set(facts["order"]["ways"]) == {"hilbert", "row"}
    assert facts["order"]["ways"]["hilbert"]["sparsity"] == pytest.approx(sum(facts["layers"][0]["sparsity"]) / 2)
    assert "pictures" not in facts["layers"][0]
    shown = page.read_text()
    assert "31.25 dB" in shown
    assert "equal" in shown
    assert "<b>made" not in shown  # names are text, not markup
    assert data_of(page)["title"] == "</script><b>made</b>"
    assert sorted(data_of(page)["order"]["path"]) == list(range(384))


def test_the_page_needs_nothing_from_outside(captured: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(str(page), "--captured", captured, "--config", FEW).exit_code == 0
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|https?://|@import", page.read_text())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--captured", "none.safetensors"], "there is no file none.safetensors"),
        (["--captured", "CAPTURED", "--grid", "4,8"], "--grid must be FRAMES,HEIGHT,WIDTH"),
        (["--captured", "CAPTURED", "--grid", "4,8,13"], "over as many tokens, not 384"),
        (["--captured", "CAPTURED", "--grid", "4,8,12", "--tokens", "128"], "leave --tokens out"),
        (["--captured", "CAPTURED", "--tokens", "999"], "the file's 384, not 999"),
        (["--captured", "CAPTURED", "--needles", "3"], "--needles is for models"),
        (["--captured", "CAPTURED", "--text", "python-docs"], "--text is for models"),
        (["--captured", "CAPTURED", "--vision", "CAPTURED"], "is not the vision.json"),
        (["--captured", "CAPTURED", "--config", "gap"], "expected NAME=VALUE"),
        (["--grid", "4,8,12"], "--grid is for --captured tokens"),
        (["--device", "tpu"], "--device must be"),
        (["--config", "gap=4", "--profile", "none"], "one of --config and --profile"),
        (["--profile", "none"], "none"),
    ],
)
def test_a_wrong_option_is_one_sentence(captured: str, tmp_path: Path, options: list[str], words: str) -> None:
    result = run(str(tmp_path / "page.html"), *(captured if part == "CAPTURED" else part for part in options))
    assert result.exit_code == 1
    assert str(result.exception).startswith("sparge report: ")
    assert words in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_refused_before_the_work(captured: str, tmp_path: Path) -> None:
    result = run(str(tmp_path), "--captured", captured)
    assert "is a folder; name the page" in str(result.exception)
    (tmp_path / "file").write_text("")
    result = run(str(tmp_path / "file" / "page.html"), "--captured", captured)
    assert str(result.exception).startswith("sparge report: ")


def test_broken_tensors_are_one_sentence(tmp_path: Path) -> None:
    made = {name: randn(seed, 2, 256, 32) for seed, name in enumerate("qkv")}
    made["k"][0, 7] = torch.nan
    save_file(made, tmp_path / "broken.safetensors", metadata={"source": "broken"})
    result = run(str(tmp_path / "page.html"), "--captured", str(tmp_path / "broken.safetensors"), "--config", FEW)
    assert "broken: its Q, K or V hold NaN" in str(result.exception)


# ---- models


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A model that can look things up, in place of SmolLM2, and a text for it."""
    from copying_model import Words, copying_model, repetitive_text

    model = copying_model(1024)
    monkeypatch.setattr(evaluation, "load_model", lambda path, dtype: LanguageModel("copies", model, Words()))
    file = tmp_path / "made.txt"
    file.write_text(repetitive_text(), encoding="utf-8")
    return ["--text", str(file), "--tokens", "512"]


def test_a_model_is_looked_at_layer_by_layer(copies: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(str(page), *copies, "--needles", "2", "--config", FEW)
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.output
    facts = data_of(page)
    assert [layer["name"] for layer in facts["layers"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert facts["summary"]["skipped"] > 0.4
    assert facts["rows"][0]["sparse"] > facts["rows"][0]["dense"]
    assert facts["needles"]["depths"] == [0, 0.5]
    assert facts["needles"]["found"]["dense"] == [1, 1]
    dense, sparse = facts["time"]
    assert sum(dense["parts"].values()) >= 0.999 * dense["whole"] > 0  # equal, unless a stage took longer alone
    assert set(sparse["parts"]) == {"prediction", "quantization", "attention", "rest"}
    assert facts["dense_layers"] == []
    assert "Every attention layer was computed sparse" in page.read_text()


def test_layers_that_stay_dense_say_why(copies: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(str(page), *copies)  # too short to gain
    assert result.exit_code == 0, result.output
    assert "every call was left to dense attention" in result.output
    facts = data_of(page)
    assert facts["dense_layers"][0]["count"] == "2"
    assert "too short to gain" in facts["dense_layers"][0]["why"]


def test_layers_that_a_profile_leaves_out_say_so(copies: list[str], tmp_path: Path) -> None:
    from sparge.profile import LayerProfile

    layer = LayerProfile({"topk": (0.3, 0.3)}, executed=(0.3, 0.3), error=(0.1, 0.1))
    sparge.Profile("copies", CONFIG, {"model.layers.1.self_attn": layer}).save(tmp_path / "found.safetensors")
    result = run(str(tmp_path / "page.html"), *copies, "--profile", str(tmp_path / "found.safetensors"))
    assert result.exit_code == 0, result.output
    facts = data_of(tmp_path / "page.html")
    assert [one["name"] for one in facts["layers"]] == ["model.layers.1.self_attn"]
    assert [one["layers"] for one in facts["dense_layers"]] == ["model.layers.0.self_attn"]
    assert any("will not be sparse" in note for note in facts["notes"])


def test_layers_that_sparge_cannot_compute_are_told_too(
    copies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from copying_model import Words
    from small_models import built, gemma2

    model = built(lambda: gemma2(softcap=30.0))
    monkeypatch.setattr(evaluation, "load_model", lambda path, dtype: LanguageModel("capped", model, Words()))
    page = tmp_path / "page.html"
    result = run(str(page), *copies, "--config", FEW)
    assert result.exit_code == 0, result.output
    facts = data_of(page)
    assert facts["layers"] == []
    assert facts["time"] == []
    assert sum(int(one["count"]) for one in facts["dense_layers"]) == 2
    assert not any("too short" in note for note in facts["notes"])


def test_ctrl_c_keeps_the_layers_that_are_done(
    copies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def until_one(run: Any, name: str, side: int, exact: Any) -> LayerFindings:
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return look_at(run, name, side, exact)

    monkeypatch.setattr(inside, "look_at", until_one)
    page = tmp_path / "page.html"
    result = run(str(page), *copies, "--config", FEW)
    assert result.exit_code == 130
    assert "interrupted" in result.output
    assert len(data_of(page)["layers"]) == 1
    assert all("rest" not in way["parts"] for way in data_of(page)["time"])  # most of it would be attention
    assert "The run was interrupted" in page.read_text()


def test_ctrl_c_before_anything_still_gives_a_page(
    copies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        from sparge.evaluate.results import LanguageResults

        return LanguageResults("copies", {"default": {}}, {}, interrupted=True)

    monkeypatch.setattr(command, "evaluate", stop)
    page = tmp_path / "page.html"
    assert run(str(page), *copies).exit_code == 130
    assert "The run was interrupted" in page.read_text()
