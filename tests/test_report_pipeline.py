"""`sparge report --pipeline`: a saved pipeline from its folder to the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparge.cli import app

pytest.importorskip("diffusers")
pytest.importorskip("skimage")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
FEW = "rule=topk,topk=0.3,subblocks=1x1,sinks=0,quantization=none,block=64x32"
SMALL = ("--prompt", "a cat", "--steps", "2", "--size", "64,96", "--frames", "9", "--seeds", "1")


def run(page: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["report", str(page), "--device", "cpu", *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from small_pipeline import small_pipeline

    path = tmp_path_factory.mktemp("pipeline")
    small_pipeline().save_pretrained(path)
    return str(path)


def test_a_saved_pipeline(folder: str, tmp_path: Path) -> None:
    from small_pipeline import GRID

    page = tmp_path / "page.html"
    result = run(page, "--pipeline", folder, *SMALL, "--config", FEW, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["title"], facts["settings"]) == ("LTXPipeline", FEW)
    assert [layer["name"] for layer in facts["layers"]] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert facts["order"]["grid"] == list(GRID)
    assert facts["vision"][0]["seeds"] == 1
    assert facts["vision"][0]["psnr"] > 20
    assert facts["about"]["looked at"] == "forward 2 of 2, seed 0"
    assert facts["samples"] == []  # pictures are for the page
    assert page.read_text().count('<img src="data:image/jpeg;base64,') == 3


def test_calls_too_short_to_gain_say_so(folder: str, tmp_path: Path) -> None:
    result = run(tmp_path / "page.html", "--pipeline", folder, *SMALL)
    assert result.exit_code == 0, result.output
    assert "too short to gain" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a cat"], "--prompt is for a --pipeline"),
        (["--pipeline", "none", "--prompt", "a cat"], "none is no folder that a pipeline"),
        (["--pipeline", "FOLDER"], "needs a --prompt"),
        (["--pipeline", "FOLDER", "--prompt", "a cat", "--size", "480"], "--size must be HEIGHT,WIDTH"),
        (["--pipeline", "FOLDER", "--prompt", "a cat", "--tokens", "999"], "--tokens is not for a --pipeline"),
        (["--pipeline", "FOLDER", "--prompt", "a cat", "--needles", "2"], "--needles is not for a --pipeline"),
        (["--pipeline", "FOLDER", "--prompt", "a cat", "--config", "gap=4", "--profile", "none"], "give only one"),
    ],
)
def test_a_wrong_option_is_one_sentence(folder: str, tmp_path: Path, options: list[str], words: str) -> None:
    result = run(tmp_path / "page.html", *(folder if part == "FOLDER" else part for part in options))
    assert result.exit_code == 1
    assert str(result.exception).startswith("sparge report: ")
    assert words in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_an_image_has_no_frames(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    class Image:
        def __call__(self, prompt: str, height: int, width: int, num_inference_steps: int) -> None: ...

        def set_progress_bar_config(self, disable: bool) -> None: ...

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *_, **__: Image())
    result = run(tmp_path / "page.html", "--pipeline", folder, *SMALL)
    assert "Image takes no num_frames." in str(result.exception)
