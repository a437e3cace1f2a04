"""Paired images and video: the metrics, the pairing, the pictures, and `sparge eval-vision`."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import refused
from typer.testing import CliRunner

import sparge
from sparge.cli import app
from sparge.evaluate.vision import SampleError, as_frames, compare_losses, compare_samples, psnr, squared_error, ssim

pytest.importorskip("skimage")
image = pytest.importorskip("PIL.Image")
from sparge.evaluate.frames import contact_sheet, side_by_side  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
runner = CliRunner()
EXACT = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none", block=(64, 32))
SOME = sparge.SparseConfig(rule="topk", topk=0.6, quantization="none", block=(64, 32), sinks=0)
FEW = sparge.SparseConfig(rule="topk", topk=0.1, quantization="none", block=(64, 32), sinks=0)


def sample(seed: int, frames: int = 3) -> torch.Tensor:
    """Frames whose every pixel attends to all of them."""
    noise = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, frames * 16 * 16, 32, generator=noise).cumsum(-2) / 8
    pixels = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0, :, :3]
    return torch.sigmoid(2 * pixels).view(frames, 16, 16, 3)


def loss(seed: int) -> float:
    return float((sample(seed) - 0.5).square().mean())


def test_less_attention_is_further_from_the_dense_sample_of_the_same_seed() -> None:
    ways = {name: lambda config=config: sparge.patched(config) for name, config in
            (("exact", EXACT), ("some", SOME), ("few", FEW))}  # fmt: skip
    seen: list[str] = []
    found = compare_samples(sample, range(2), ways, lambda way, pair: seen.append(way))
    assert seen == ["exact", "some", "few"] * 2
    for exact, some, few in zip(*found.values(), strict=True):
        assert exact.seed == some.seed == few.seed
        assert exact.psnr > 80 > some.psnr > few.psnr
        assert exact.ssim > some.ssim > few.ssim
        assert exact.executed == exact.visible > few.executed > 0
        assert np.array_equal(exact.dense, as_frames(sample(exact.seed)))
        assert np.array_equal(some.dense, few.dense)


def test_nothing_changed_is_equal_to_the_bit() -> None:
    pair = compare_samples(sample, [5], {"dense": sparge.patched})["dense"][0]  # too short to gain: torch's own
    assert (pair.squared_error, pair.psnr, pair.ssim) == (0.0, None, 1.0)


def test_losses_are_paired_by_seed() -> None:
    ways = {"exact": lambda: sparge.patched(EXACT), "few": lambda: sparge.patched(FEW)}
    gaps = compare_losses(loss, range(4), ways)
    assert gaps["exact"].change == pytest.approx(0, abs=1e-6)
    few = gaps["few"]
    assert few.dense == tuple(loss(seed) for seed in range(4))
    assert few.change == pytest.approx(np.mean(few.sparse) - np.mean(few.dense))
    assert abs(few.change) > 1e-4
    low, high = few.interval
    assert low <= few.change <= high


def test_metrics_are_what_they_say() -> None:
    flat = as_frames(np.full((8, 8, 3), 0.5))
    brighter = as_frames(np.full((8, 8, 3), 0.6))
    assert squared_error(flat, brighter) == pytest.approx(0.01)
    assert psnr(0.01) == pytest.approx(20)
    assert psnr(0) is None
    noisy = as_frames(np.random.default_rng(0).random((8, 8, 3)))
    assert ssim(flat, flat) == pytest.approx(1)
    assert ssim(flat, noisy) < 0.5
    with refused(SampleError, "one shape"):
        squared_error(flat, as_frames(np.zeros((9, 8, 3))))


def test_frames_come_in_many_shapes() -> None:
    values = np.arange(2 * 8 * 9 * 3).reshape(2, 8, 9, 3) % 256
    want = (values / 255).astype(np.float32)
    assert np.allclose(as_frames(values.astype(np.uint8)), want)
    assert np.allclose(as_frames(torch.from_numpy(want)), want)
    assert np.allclose(as_frames(torch.from_numpy(want).bfloat16()), want, atol=0.01)
    assert np.allclose(as_frames([image.fromarray(frame) for frame in values.astype(np.uint8)]), want)
    assert as_frames(want[0]).shape == (1, 8, 9, 3)


@pytest.mark.parametrize(
    ("sampled", "words"),
    [
        (np.zeros((8, 8)), "[height, width, channels]"),
        (np.zeros((3, 8, 8)), "1 or 3 channels"),
        (np.zeros((4, 4, 3)), "sides of 7 or more"),
        (np.full((8, 8, 3), 1.5), "floats from 0 to 1"),
        (np.full((8, 8, 3), math.nan), "floats from 0 to 1"),
        (np.zeros((8, 8, 3), dtype=np.int64), "bytes"),
    ],
)
def test_other_frames_are_refused(sampled: Any, words: str) -> None:
    with refused(SampleError, words):
        as_frames(sampled)


def test_a_model_that_is_sparse_already_is_refused() -> None:
    with refused(SampleError, "unpatch the model first"), sparge.patched(FEW):
        compare_samples(sample, [0], {"few": lambda: sparge.patched(FEW)})


def test_pictures_show_both_ways(tmp_path: Path) -> None:
    pairs = compare_samples(sample, range(2), {"few": lambda: sparge.patched(FEW)})["few"]
    contact_sheet(pairs, tmp_path / "sheet.png")
    with image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 16, 2 * (3 * (16 + 14 + 4) + 4))  # frames; seeds x (dense, sparse, difference)
    images = [replace(pair, dense=pair.dense[:1], sparse=pair.sparse[:1]) for pair in pairs]
    contact_sheet(images, tmp_path / "images.png")
    with image.open(tmp_path / "images.png") as sheet:
        assert sheet.size == (2 * 16, 3 * (16 + 14 + 4) + 4)  # seeds; dense, sparse, difference
        shown = np.asarray(sheet)[14 : 14 + 16, 16:] / 255
    assert np.abs(shown - pairs[1].dense[0]).max() < 0.01
    side_by_side(pairs[0], tmp_path / "both.gif", fps=4)
    with image.open(tmp_path / "both.gif") as video:
        assert (video.n_frames, video.size, video.info["duration"]) == (3, (32, 30), 250)
        shown = np.asarray(video.convert("RGB"))[14:]
    assert np.abs(shown[:, :16] / 255 - pairs[0].dense[0]).mean() < 0.05  # the palette rounds
    with refused(ValueError, "gif or mp4"):
        side_by_side(pairs[0], tmp_path / "both.avi", fps=4)


def test_mp4_where_it_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = compare_samples(sample, [0], {"few": lambda: sparge.patched(FEW)})["few"][0]
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        side_by_side(pair, tmp_path / "both.mp4", fps=4)
        assert (tmp_path / "both.mp4").read_bytes()[4:8] == b"ftyp"
    find = importlib.util.find_spec
    hidden = "imageio_ffmpeg"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == hidden else find(name, *rest))
    with refused(ImportError, "or take gif"):
        side_by_side(pair, tmp_path / "other.mp4", fps=4)


# ---- the command

FILE = """
import torch

class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

def sample(seed):
    q, k, v = torch.randn(3, 1, 1, 512, 32, generator=torch.Generator().manual_seed(seed)).cumsum(-2) / 8
    return torch.sigmoid(Attention()(q, k, v)[0, 0, :, :3]).view(2, 16, 16, 3)

def loss(seed):
    return sample(seed).square().mean()

def stopped(seed):
    if seed == 2:
        raise KeyboardInterrupt
    return sample(seed)

nothing = 1
"""
SETTINGS = "rule=topk,topk=0.2,quantization=none,block=64x32"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def run(*options: str) -> Any:
    return runner.invoke(app, ["eval-vision", *options])


def test_the_command_prints_a_table_and_writes_files(file: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run(f"{file}:sample", "--seeds", "2", "--loss", "loss", "--config", SETTINGS, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "PSNR" in result.output
    assert "…" not in result.output
    row = json.loads((out / "vision.json").read_text())["rows"][0]
    assert f"{row['ssim']:.4f}" in result.output
    assert row["settings"] == SETTINGS
    assert 0 < row["skipped"] < 1
    assert 10 < row["worst_psnr"] <= row["psnr"] < 80
    assert len(row["by_seed"]) == 2
    assert row["loss_change"] == pytest.approx(row["sparse_loss"] - row["dense_loss"], abs=1e-6)
    assert SETTINGS in (out / "vision.md").read_text()
    assert {path.name for path in out.iterdir()} == {
        "vision.json", "vision.md", "contact-sheet.png", "side-by-side.gif"
    }  # fmt: skip


def test_ctrl_c_keeps_the_pairs_that_are_done(file: str) -> None:
    result = run(f"{file}:stopped", "--seeds", "4", "--json")
    assert result.exit_code == 130
    facts = json.loads(result.stdout)
    assert facts["interrupted"]
    assert facts["rows"][0]["seeds"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.py:sample"], "a file that is there"),
        (["FILE"], "a file that is there"),
        (["FILE:other"], "defines no function other"),
        (["FILE:nothing"], "defines no function nothing"),
        (["FILE:sample", "--loss", "gain"], "defines no function gain"),
        (["FILE:sample", "--model", "net"], "defines no model net"),
        (["FILE:sample", "--model", "nothing"], "not int"),
        (["FILE:loss"], "[height, width, channels]"),
        (["FILE:sample", "--video", "avi"], "gif or mp4"),
        (["FILE:sample", "--config", "gap"], "expected NAME=VALUE"),
        (["FILE:sample", "--config", "gap=4", "--config", "gap=4"], "there twice"),
        (["FILE:sample", "--out", "FILE"], "exists"),
    ],
)
def test_a_wrong_option_is_one_sentence(file: str, options: list[str], words: str) -> None:
    result = run(*(option.replace("FILE", file) for option in options))
    assert result.exit_code == 1
    assert str(result.exception).startswith("sparge eval-vision: ")
    assert words in str(result.exception)


def test_an_error_in_the_file_itself_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def sample(seed):\n    raise ValueError('mine')\n")
    result = run(f"{tmp_path / 'wrong.py'}:sample")
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "mine"


def test_attention_that_sparge_never_sees_is_said(file: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import numpy\ndef sample(seed):\n    return numpy.zeros((8, 8, 3))\n")
    assert "no attention call was sparse" in run(f"{tmp_path / 'plain.py'}:sample").output


def test_without_its_extra_it_is_one_sentence(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "skimage" else find(name, *rest)
    )
    assert "sparge[eval]" in str(run(f"{file}:sample").exception)
