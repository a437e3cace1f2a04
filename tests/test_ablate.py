"""sparge ablate: its variants, its figures, its files, its bad inputs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from problems import randn
from safetensors.torch import save_file
from typer.testing import CliRunner

from sparge import SparseConfig, ablate
from sparge.bench.captured import read_captured
from sparge.cli import app

TOKENS = 384
runner = CliRunner()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small layer: two query heads, one key head, tokens that change slowly."""
    path = tmp_path / "layer.safetensors"
    q, k, v = (randn(n, heads, TOKENS, 32).cumsum(1) / 4 for n, heads in ((0, 2), (1, 1), (2, 1)))
    save_file({"q": q, "k": k, "v": v}, path, metadata={"causal": "true", "source": "a walk"})
    return path


def full(file: Path) -> Path:
    """The same tensors, attended to in both directions."""
    made = read_captured(file)
    path = file.with_name("full.safetensors")
    save_file({"q": made.query, "k": made.key, "v": made.value}, path)
    return path


def test_every_part_of_the_method_is_taken_out_once():
    groups = {variant.group for variant in ablate.variants((1, 16, 24))}
    assert groups == {
        "stages", "judge of self-similarity", "sub-means per block", "rule", "block", "number format", "token order",
    }  # fmt: skip
    assert "token order" not in {variant.group for variant in ablate.variants()}
    names = [(variant.group, variant.name) for variant in ablate.variants((1, 16, 24))]
    assert len(set(names)) == len(names)


def test_the_command_prints_a_table_and_writes_files(file, tmp_path):
    result = runner.invoke(app, ["ablate", str(file), "--out", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0, result.output
    assert "self-similarity" in " ".join(result.output.split()).replace("self-simi…", "self-similarity")
    folder = tmp_path / "new" / "folder"
    written = json.loads((folder / "ablation.json").read_text())
    assert written["source"] == "a walk"
    assert written["tokens"] == TOKENS
    assert len(written["rows"]) == len(ablate.variants())
    for row in written["rows"]:
        assert 0 < row["values"] <= row["scores"] <= 1
        assert 0 <= row["error"] <= row["worst_head"]
    assert (folder / "ablation.md").read_text().count("\n") == len(written["rows"]) + 4
    assert (folder / "ablation.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_the_figures_are_those_of_the_settings(file):
    captured = read_captured(file)
    query, key, value = (x[None] for x in (captured.query, captured.key, captured.value))
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def row(**settings) -> ablate.Row:
        config = SparseConfig(quantization="none", **settings)
        return ablate.measure(captured, ablate.Variant("", "", config), exact, None)

    everything = row(rule="topk", topk=1.0)
    assert (everything.scores, everything.values) == (1.0, 1.0)
    assert everything.worst_head < 1e-5
    second = row(rule="topk", topk=1.0, pv_threshold=-0.5)
    assert second.scores == 1.0
    assert second.values < 1.0
    few, more = row(rule="topk", topk=0.1), row(rule="topk", topk=0.6)
    assert few.scores < more.scores
    assert few.error > more.error > 0


def test_token_orders_change_what_is_skipped_not_what_is_meant(file):
    result = runner.invoke(app, ["ablate", str(full(file)), "--grid", "2,12,16", "--json"])
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads(result.stdout)["rows"] if row["group"] == "token order"]
    assert [row["name"] for row in rows] == ["hilbert", "row", "column", "time", "random"]
    assert len({row["error"] for row in rows}) > 1
    assert all(row["error"] < 0.2 for row in rows)


def test_ctrl_c_keeps_what_was_done(file, monkeypatch, tmp_path):
    measure, done = ablate.measure, []

    def until_three(*arguments):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(measure(*arguments))
        return done[-1]

    monkeypatch.setattr(ablate, "measure", until_three)
    result = runner.invoke(app, ["ablate", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 130
    assert "Interrupted after 3" in result.output
    assert len(json.loads((tmp_path / "out" / "ablation.json").read_text())["rows"]) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["missing.safetensors"], "there is no file missing.safetensors"),
        (["FILE", "--tokens", "1000"], "--tokens must lie from 1 to the file's 384, not 1000."),
        (["FILE", "--tokens", "10", "--grid", "2,12,16"], "leave --tokens out"),
        (["FILE", "--grid", "2,12"], "--grid must be FRAMES,HEIGHT,WIDTH, not 2,12."),
        (["FILE", "--grid", "2,12,x"], "--grid must be FRAMES,HEIGHT,WIDTH, not 2,12,x."),
        (["FILE", "--grid", "2,12,16"], "--grid 2,12,16 needs attention that is not causal"),
    ],
)
def test_bad_options_are_one_sentence(file, options, said):
    result = runner.invoke(app, ["ablate", *(str(file) if option == "FILE" else option for option in options)])
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output
