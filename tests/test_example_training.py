"""examples/train on toy clips: it learns, goes on where it stopped, and its samples can be judged dense and sparse."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused
from rich.console import Console
from typer.testing import CliRunner

import sparge

pytest.importorskip("skimage")
pytest.importorskip("PIL")
from examples.train import evaluate as evaluation
from examples.train import prepare, sample
from examples.train.data import Batch, Clip, DataError, read_clips, write_clips
from examples.train.flow import flow_loss, generate
from examples.train.layers import attention_by_layer, sparse_layers, tuned
from examples.train.model import (
    ModelConfig,
    VideoTransformer,
    WeightsError,
    load_weights,
    patches,
    pixels_of,
    save_weights,
)
from examples.train.recipes import RECIPES, estimate
from examples.train.train import Limits, Run, RunError, train, write_results
from sparge.cli import app
from sparge.evaluate.vision import compare_samples
from sparge.report.model import report_model

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
QUIET = Console(quiet=True)


def toy_clips() -> list[Clip]:
    """A square that moves over a plain ground; its colour is its class."""
    random = np.random.default_rng(0)
    clips = []
    for number in range(12):
        frames = np.full((6, 36, 36, 3), 40, dtype=np.uint8)
        top, left = random.integers(0, 16, 2)
        for time, frame in enumerate(frames):
            frame[top : top + 12, left + time : left + time + 12, number % 3] = 220
        clips.append(Clip(frames, number % 3, held_out=number >= 9))
    return clips


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "toy.safetensors"
    write_clips(path, toy_clips(), ["red", "green", "blue"], "squares")
    return path


def trained(name: str, data: Path, folder: Path, steps: int) -> Run:
    run = Run(name, read_clips(data), Limits(steps, None), seed=1, device=CPU)
    train(run, folder, save_every=1e9, console=QUIET)
    write_results(run, folder, QUIET)
    return run


@pytest.fixture(scope="module")
def video_folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    torch.set_num_threads(1)
    trained("tiny-video", data, folder, steps=50)
    return folder


@pytest.fixture
def sampler(video_folder: Path, data: Path) -> sample.Sampler:
    return sample.Sampler(video_folder / "tiny-video.safetensors", data, device="cpu")


# ---- data and model


def test_clips_come_back_as_they_were_written(data: Path) -> None:
    clips = read_clips(data)
    assert clips.classes == ("red", "green", "blue")
    assert clips.frames.shape == (72, 36, 36, 3)
    assert (clips.frames[:6].float() - torch.from_numpy(toy_clips()[0].frames).float()).abs().mean() < 8  # JPEG
    windows = clips.windows(4, held_out=True)
    assert windows.tolist() == [[54 + 6 * clip + shift, clip] for clip in range(3) for shift in range(3)]
    middle = clips.fixed_batch(windows, [1], 4, 32)
    assert torch.equal(middle.pixels, clips.frames[None, 55:59, 2:34, 2:34].float() / 127.5 - 1)
    with refused(DataError, "no held-out clip of 7 frames"):
        clips.windows(7, held_out=True)
    with refused(DataError, "less than the 64 of the model"):
        clips.fixed_batch(windows, [0], 4, 64)


def test_training_batches_are_cropped_mirrored_and_repeatable(data: Path) -> None:
    clips = read_clips(data)
    windows = clips.windows(4, held_out=False)
    first, again = (clips.training_batch(windows, 16, 4, 32, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.pixels, again.pixels)
    assert first.pixels.shape == (16, 4, 32, 32, 3)
    bright = first.pixels.amax(-1) > 0
    centres = (bright * torch.arange(32.0)).sum((2, 3)) / bright.sum((2, 3))
    moved = (centres[:, -1] - centres[:, 0]).sign()
    assert set(moved.tolist()) == {-1.0, 1.0}  # squares move to the right, mirrored ones to the left


def test_other_files_are_refused(tmp_path: Path, data: Path) -> None:
    with refused(DataError, "there is no data"):
        read_clips(tmp_path / "none.safetensors")
    with refused(WeightsError, "does not hold weights"):
        load_weights(data)
    with refused(WeightsError, "there are no weights"):
        load_weights(tmp_path / "none.safetensors")
    with refused(DataError, "no folder train/CLASS"):
        prepare.image_clips(tmp_path)


def test_commands_end_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sample", str(tmp_path / "none.safetensors")])
    with pytest.raises(SystemExit, match="there are no weights"):
        runpy.run_path(sample.__file__, run_name="__main__")


def test_images_are_clips_of_one_frame(tmp_path: Path) -> None:
    from PIL import Image

    for part, name in (("train", "hat"), ("train", "shoe"), ("validation", "hat")):
        (tmp_path / part / name).mkdir(parents=True)
        Image.new("RGB", (60, 40), "red").save(tmp_path / part / name / "one.jpg")
    clips, classes = prepare.image_clips(tmp_path)
    assert classes == ["hat", "shoe"]
    assert [(clip.label, clip.held_out) for clip in clips] == [(0, False), (1, False), (0, True)]
    assert clips[0].frames.shape == (1, prepare.IMAGE_SIDE, prepare.IMAGE_SIDE, 3)
    prepare.contact_sheet(clips, tmp_path / "sheet.png")


def test_patches_and_pixels_are_inverse() -> None:
    pixels = torch.randn(2, 3, 8, 12, 3)
    tokens = patches(pixels, 4)
    assert tokens.shape == (2, 3 * 2 * 3, 48)
    assert torch.equal(tokens[1, 0].view(4, 4, 3), pixels[1, 0, :4, :4])
    assert torch.equal(pixels_of(tokens, (3, 2, 3), 4), pixels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_the_tokens_changes_no_result(dtype: torch.dtype) -> None:
    model = VideoTransformer(ModelConfig(2, 16, 2, 64, 2, classes=3)).to(dtype)
    for parameter in model.parameters():  # away from the start, where each block is the identity
        torch.nn.init.normal_(parameter, std=0.05)
    inputs = (torch.randn(2, 2, 16, 16, 3), torch.rand(2), torch.tensor([0, 3]))
    with torch.no_grad():
        row = model(*inputs)
        model.order = "hilbert"
        hilbert = model(*inputs)
    assert row.dtype == torch.float32
    assert row.std() > 0.01
    assert (row - hilbert).abs().max() < (1e-5 if dtype == torch.float32 else 0.02) * row.abs().max()


def test_weights_come_back_rounded_to_bfloat16(tmp_path: Path) -> None:
    model = VideoTransformer(ModelConfig(1, 16, 2, 64, 1, classes=2))
    save_weights(model, tmp_path / "some.safetensors", {"recipe": "some"})
    loaded, facts = load_weights(tmp_path / "some.safetensors")
    assert (facts["recipe"], loaded.config) == ("some", model.config)
    assert torch.equal(loaded.embed.weight, model.embed.weight.bfloat16().float())


@pytest.mark.parametrize(("name", "tokens"), [("video", 16_384), ("image", 4_096)])
def test_the_recipes_fit_their_limits(name: str, tokens: int) -> None:
    config = RECIPES[name].model(classes=10)
    with torch.device("meta"):
        size = 2 * sum(parameter.numel() for parameter in VideoTransformer(config).parameters())
    assert config.tokens == tokens
    assert size < 15.5e6  # bytes, in bfloat16
    assert f"{tokens:,}" in estimate(name, minutes=8)


# ---- training


@pytest.mark.parametrize("name", ["tiny-video", "tiny-image"])
def test_training_lowers_the_loss(name: str, data: Path, tmp_path: Path) -> None:
    before = Run(name, read_clips(data), Limits(1, None), seed=1, device=CPU).held_out_loss()
    run = trained(name, data, tmp_path, steps=40)
    assert run.held_out_loss() < 0.75 * before
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["losses"][-1]["step"] == losses["step"] == 40
    assert {record["shrink"] for record in losses["losses"]} == {1, 2}
    assert f"{name}: a small diffusion transformer" in (tmp_path / f"{name}.md").read_text()
    assert load_weights(tmp_path / f"{name}.safetensors")[0].config == run.model.config


def test_a_run_that_was_stopped_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    whole = Run("tiny-video", read_clips(data), Limits(12, None), seed=2, device=CPU)
    train(whole, tmp_path, 1e9, QUIET)
    stopped = Run("tiny-video", read_clips(data), Limits(12, None), seed=2, device=CPU)
    for _ in range(7):
        stopped.advance()
    stopped.save(tmp_path / "stopped.pt")
    again = Run("tiny-video", read_clips(data), Limits(12, None), seed=2, device=CPU)
    again.resume(tmp_path / "stopped.pt")
    assert again.history.step == 7
    train(again, tmp_path, 1e9, QUIET)
    for ours, theirs in ((again.model, whole.model), (again.averaged, whole.averaged)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    other = Run("tiny-video", read_clips(data), Limits(12, None), seed=3, device=CPU)
    with refused(RunError, "another recipe, start, seed or data"):
        other.resume(tmp_path / "stopped.pt")


def test_a_run_may_begin_with_weights(data: Path, tmp_path: Path) -> None:
    trained("tiny-image", data, tmp_path, steps=3)
    weights = tmp_path / "tiny-image.safetensors"
    for n in (1, 2):  # as often as one likes
        run = Run("tiny-image", read_clips(data), Limits(2, None), seed=n, device=CPU)
        run.start_from(weights)
        begun = zip(
            run.model.parameters(), run.averaged.parameters(), load_weights(weights)[0].parameters(), strict=True
        )
        assert all(torch.equal(ours, theirs) and torch.equal(kept, theirs) for ours, kept, theirs in begun)
        (tmp_path / str(n)).mkdir()
        train(run, tmp_path / str(n), 1e9, QUIET)
        write_results(run, tmp_path / str(n), QUIET)
        weights = tmp_path / str(n) / "tiny-image.safetensors"
    assert run.before["steps"] == 3 + 2
    assert "2 steps in" in (tmp_path / "2" / "tiny-image.md").read_text()
    assert ", after 5 steps in" in (tmp_path / "2" / "tiny-image.md").read_text()
    video = Run("tiny-video", read_clips(data), Limits(1, None), seed=0, device=CPU)
    with refused(RunError, "another model than that of tiny-video"):
        video.start_from(weights)


def test_a_run_ends_in_time(data: Path, tmp_path: Path) -> None:
    run = Run("tiny-image", read_clips(data), Limits(None, 0.01), seed=0, device=CPU)
    train(run, tmp_path, 1e9, QUIET)
    assert 0.6 <= run.history.seconds < 5
    assert (tmp_path / "checkpoint.pt").is_file()
    with refused(RunError, "--minutes, --steps, or both"):
        Limits(None, None)


def test_ctrl_c_saves(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("tiny-image", read_clips(data), Limits(9, None), seed=0, device=CPU)
    advance = run.advance
    monkeypatch.setattr(run, "advance", lambda: advance() if run.history.step < 3 else _interrupt())
    train(run, tmp_path, 1e9, QUIET)
    again = Run("tiny-image", read_clips(data), Limits(9, None), seed=0, device=CPU)
    again.resume(tmp_path / "checkpoint.pt")
    assert again.history.step == 3


def _interrupt() -> torch.Tensor:
    raise KeyboardInterrupt


# ---- samples, dense and sparse


def test_the_seed_decides_the_sample(sampler: sample.Sampler) -> None:
    assert torch.equal(sampler(4), sampler(4))
    assert not torch.equal(sampler(4), sampler(5))
    assert sampler(4).shape == (4, 32, 32, 3)
    assert sampler.loss(1) == sampler.loss(1) != sampler.loss(2)
    assert sampler.step is None


def test_guidance_of_one_is_none(sampler: sample.Sampler) -> None:
    noise, label = torch.randn(1, 4, 32, 32, 3), torch.tensor([1])
    alone = generate(sampler.model, noise, label, steps=2, guidance=1.0, shift=1.0)
    nearly = generate(sampler.model, noise, label, steps=2, guidance=1.0 + 1e-6, shift=1.0)
    assert torch.allclose(alone, nearly, atol=1e-4)


def test_layers_are_called_by_name(sampler: sample.Sampler) -> None:
    seen = []

    def attend(layer: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    with attention_by_layer(sampler.model, attend):
        sampler(0)
    assert seen == ["blocks.0.attention", "blocks.1.attention"] * sampler.sampling["steps"]


def test_nothing_skipped_gives_the_same_samples(sampler: sample.Sampler) -> None:
    everything = sparge.SparseConfig(rule="topk", topk=1.0)
    computed = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none")  # by sparge's engine
    ways = {
        "equal": lambda: sparse_layers(sampler, lambda _: everything),
        "patched": lambda: sparge.patched(everything),
        "close": lambda: sparse_layers(sampler, lambda _: computed),
    }
    pairs = compare_samples(sampler, [0], ways)
    assert pairs["equal"][0].psnr is pairs["patched"][0].psnr is None
    assert pairs["close"][0].psnr > 100
    assert pairs["close"][0].executed == pairs["close"][0].visible > 0


def test_dense_steps_count_as_skipping_nothing(sampler: sample.Sampler) -> None:
    few = sparge.SparseConfig(rule="topk", topk=0.3, quantization="none", block=(64, 32), sinks=0)
    steps = sampler.sampling["steps"]
    ways = {
        name: (lambda dense_steps=dense_steps: sparse_layers(sampler, lambda _: few, dense_steps))
        for name, dense_steps in (("none", 0), ("half", steps // 2), ("all", steps))
    }
    none, half, everything = (pairs[0] for pairs in compare_samples(sampler, [0], ways).values())
    shares = [1 - pair.executed / pair.visible for pair in (none, half, everything)]
    assert shares[0] > shares[1] > shares[2] == 0
    assert none.psnr < half.psnr
    assert everything.psnr is None


def test_tuned_profiles_name_every_layer(sampler: sample.Sampler) -> None:
    base = sparge.SparseConfig(quantization="none", block=(64, 32))
    profiles = tuned(sampler, [0.02, 0.3], base)
    assert list(profiles[0.3].layers) == ["blocks.0.attention", "blocks.1.attention"]
    assert profiles[0.3].executed < profiles[0.02].executed <= 1


def test_the_evaluation_runs_end_to_end(sampler: sample.Sampler, tmp_path: Path) -> None:
    result = evaluation.evaluate(sampler, [0.1], 1, 30.0, QUIET)
    assert [outcome.way.order for outcome in result.found] == ["hilbert"] * 5 + ["row"] * 5
    chosen = result.judged[0]
    assert chosen.way is evaluation.best(result.found, 30.0).way
    assert [pair.seed for pair in chosen.pairs] == [1]  # not the seed that it was chosen with
    text = result.text(30.0, 0.45)
    assert "dB at 45% skipped" in text
    assert "| l1 0.1 | " in text
    evaluation.write(sampler, result, text, tmp_path)
    facts = json.loads((tmp_path / "tiny-video-results.json").read_text())
    assert facts["chosen"] == chosen.way.name
    assert list(facts["chosen_by_layer_and_head"]) == ["blocks.0.attention", "blocks.1.attention"]
    assert (len(facts["found"]), len(facts["judged"])) == (10, 1)
    assert [row["skipped"] for row in facts["found"] if row["settings"] == "nothing skipped"] == [0, 0]
    assert sparge.Profile.load(tmp_path / "tiny-video-profile.safetensors").layers
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".safetensors", ".png", ".gif"}


def test_the_best_is_the_sparsest_that_is_good_enough() -> None:
    def outcome(order: str, skipped: float, decibels: float | None) -> evaluation.Outcome:
        profile = object()
        way = evaluation.Way(order, f"{skipped}", 0, lambda _: sparge.SparseConfig(), profile)  # type: ignore[arg-type]
        return evaluation.Outcome(way, [], {"skipped": skipped, "psnr": decibels})

    good, sparser, bad, row = (
        outcome("hilbert", 0.4, 40), outcome("hilbert", 0.5, 31), outcome("hilbert", 0.6, 29), outcome("row", 0.9, 50)
    )  # fmt: skip
    assert evaluation.best([good, sparser, bad, row], 30) is sparser
    assert evaluation.best([good, sparser, bad, row], 45) is good


def test_eval_vision_takes_the_samples(video_folder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom examples.train.sample import Sampler\n"
        f"sampler = Sampler(Path({str(video_folder / 'tiny-video.safetensors')!r}), Path({str(data)!r}), 'cpu')\n"
        "loss = sampler.loss\n"
    )
    settings = "rule=topk,topk=0.2,quantization=none,block=64x32,subblocks=1x1"
    options = ["--seeds", "2", "--loss", "loss", "--json", "--config", settings]
    result = CliRunner().invoke(app, ["eval-vision", f"{tmp_path / 'mine.py'}:sampler", *options])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][0]
    assert row["skipped"] > 0.5
    assert row["loss_change"] is not None


@pytest.mark.parametrize("name", ["video", "image"])
def test_the_trained_weights_know_their_subject(name: str) -> None:
    """At half the side, on which training begins: they see through noise what is smooth."""
    model, facts = load_weights(sample.HERE / "weights" / f"{name}.safetensors")
    assert model.config == RECIPES[name].model(len(json.loads(facts["classes"])))
    assert facts["recipe"] == name
    wave = torch.linspace(-0.8, 0.4, 64)
    pixels = wave[None, None, :, None, None].expand(1, model.config.frames, 64, 64, 3).contiguous()
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(pixels, torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        loss = flow_loss(model, batch, torch.tensor([0.7]), noise, batch.labels)
    assert loss < 0.25 * float((pixels - noise).square().mean())


def test_the_hooks_say_that_there_are_no_weights_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "HERE", tmp_path)
    for hook in (sample.video, sample.image, sample.video_loss, sample.image_loss):
        with refused(WeightsError, "there are no weights"):
            hook(0)


def test_a_report_looks_inside(sampler: sample.Sampler, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    few = sparge.SparseConfig(rule="topk", topk=0.5, quantization="none", block=(64, 32))
    grid = sampler.model.config.grid
    report = report_model(sampler.model, sampler, tmp_path / "page.html", few, seeds=1, grid=grid)
    assert [layer.name for layer in report.layers] == [f"blocks.{n}.attention" for n in range(len(report.layers))]
    assert len(report.layers) == sampler.model.config.depth
    assert report.look.order is not None
    assert report.look.order["grid"] == grid
    assert set(report.look.order["ways"]) == {"hilbert", "row"}
    assert report.vision[0]["psnr"] > 15


def test_samples_can_be_looked_at(sampler: sample.Sampler, tmp_path: Path) -> None:
    sheet, moving = sample.write_samples(sampler, 2, tmp_path / "samples.png")
    from PIL import Image

    with Image.open(sheet) as picture:
        assert picture.size == (4 * 32, 2 * 32)
    with Image.open(moving) as picture:
        assert (picture.n_frames, picture.size) == (4, (64, 32))
