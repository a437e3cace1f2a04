"""report_model: any model dense and sparse, looked at from inside; small models of diffusers and of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problems import refused
from torch import Tensor, nn

import sparge
from sparge.evaluate.vision import SampleError, compare_samples
from sparge.report import inside
from sparge.report.findings import LayerFindings, look_at
from sparge.report.inside import together
from sparge.report.model import report_model
from sparge.report.page import Report

pytest.importorskip("skimage")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
FEW = sparge.SparseConfig(rule="topk", topk=0.3, subblocks=(1, 1), sinks=0, quantization="none", block=(64, 32))
GRID = (3, 8, 8)


class Attention(nn.Module):
    """Calls torch's attention, as a model of one's own would."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 3 * 64)
        self.out = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Own(nn.Module):
    """Denoises tokens of a grid, which it puts in Hilbert order itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.order = sparge.token_order(GRID)

    def forward(self, x: Tensor) -> Tensor:
        y = self.order.apply(x)
        for block in self.blocks:
            y = y + block(y)
        return self.order.restore(y)

    def sample(self, seed: int) -> Tensor:
        x = torch.randn(1, 192, 16, generator=torch.Generator().manual_seed(seed))
        for _ in range(4):
            x = x + 0.5 * self(x)
        return x[0, :, :3].sigmoid().view(3, 8, 8, 3)


def called(report: Report) -> list[str]:
    return [layer.name for layer in report.layers]


# ---- models of diffusers


def families() -> list[Any]:
    from importlib.util import find_spec

    names = ("flux", "sd3", "cogvideox", "wan", "hunyuan", "ltx", "mochi")
    return [
        pytest.param(name, marks=pytest.mark.skipif(not find_spec("diffusers"), reason="needs diffusers"))
        for name in names
    ]


@pytest.mark.parametrize("name", families())
def test_a_transformer_of_diffusers_by_its_inputs(name: str, tmp_path: Path) -> None:
    from small_diffusers import SMALL, output

    one = SMALL[name]
    model = one.built()
    before = output(model, **one.inputs)
    report = report_model(model, one.inputs, tmp_path / "page.html", FEW)
    planned = sparge.patch(model, FEW, dry_run=True).layers
    assert called(report) == [layer.name for layer in planned if layer.action == "sparse"]
    assert report.layers[0].tokens == (one.text + 180,) * 2
    assert all(0.2 < share < 0.8 for layer in report.layers for share in layer.sparsity)
    left_alone = [layer.name for layer in planned if layer.action != "sparse"]
    assert sum(int(row["count"]) for row in report.dense_layers()) == len(left_alone)
    order = report.look.order
    assert order is not None
    assert order["grid"] == one.grid
    assert sorted(order["path"]) == list(range(180))
    assert 0 < order["ways"]["row"]["error"] < 0.5
    for way in report.time_split():
        assert way["whole"] > 0
        assert way["parts"]["rest"] > 0
    assert report.vision == []  # there are no pictures
    assert "Hilbert order" in (tmp_path / "page.html").read_text()
    assert torch.equal(output(model, **one.inputs), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["flux", "hunyuan", "wan"])
def test_row_order_is_what_the_layer_would_do_without_the_curve(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    from small_diffusers import SMALL

    from sparge.integrations.diffusers import order

    one = SMALL[name]
    more = {"num_layers": 1} if name == "wan" else {"num_layers": 1, "num_single_layers": 0}
    model = one.built(**more)
    told = report_model(model, one.inputs, tmp_path / "page.html", FEW).look.order
    in_rows = sparge.token_order
    monkeypatch.setattr(order, "token_order", lambda grid, name: in_rows(grid, "row"))
    order._order.cache_clear()
    try:
        found = report_model(model, one.inputs, tmp_path / "page.html", FEW).layers[0]
    finally:
        order._order.cache_clear()
    assert told is not None
    assert told["ways"]["row"]["sparsity"] == pytest.approx(sum(found.sparsity) / 2)
    assert told["ways"]["row"]["error"] == pytest.approx(sum(found.error) / 2, rel=1e-3)
    assert told["ways"]["row"]["error"] != pytest.approx(told["ways"]["hilbert"]["error"], rel=1e-3)


def test_calls_that_sparge_refuses_say_why_each_time(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from small_diffusers import SMALL

    flux = SMALL["flux"]
    inputs = {**flux.inputs, "img_ids": flux.inputs["img_ids"].flip(0)}
    model = flux.built()
    for _ in range(2):  # a warning is given once
        report = report_model(model, inputs, tmp_path / "page.html", FEW)
        assert report.layers == []
        assert [(row["count"], row["action"]) for row in report.dense_layers()] == [("2", "dense")]
        assert "not those of whole pictures" in report.dense_layers()[0]["why"]
        assert "not those of whole pictures" in (tmp_path / "page.html").read_text()
        assert report.time_split() == []
        assert "nothing to see inside" in report.notes[0]


def test_dense_steps_and_layers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from small_diffusers import SMALL

    wan = SMALL["wan"]
    model = wan.built()

    def denoise(seed: int) -> None:
        for time in (900.0, 700.0, 500.0, 300.0):
            model(**{**wan.inputs, "timestep": torch.tensor([time, time])})

    report = report_model(
        model, denoise, tmp_path / "page.html", FEW, seeds=1, dense_steps=2, dense_layers="blocks.0.*"
    )
    assert report.about["looked at"] == "forward 4 of 4"  # the middle one of the last two
    assert called(report) == ["blocks.1.attn1"]
    kept = {row["layers"]: row["why"] for row in report.dense_layers()}
    assert kept["blocks.0.attn1"] == "kept dense as asked"
    dense = report_model(model, denoise, tmp_path / "page.html", FEW, seeds=1, dense_steps=2, forward=1)
    assert dense.about["looked at"] == "forward 1 of 4"
    assert dense.layers == []


# ---- pipelines


@pytest.fixture(scope="module")
def pipe() -> Any:
    pytest.importorskip("diffusers")
    from small_pipeline import small_pipeline

    return small_pipeline()


def test_a_pipeline_by_its_arguments(pipe: Any, tmp_path: Path) -> None:
    from small_pipeline import GRID, SIZE

    asked = {"prompt": "a cat", "num_inference_steps": 3, **SIZE}
    report = report_model(pipe, asked, tmp_path / "page.html", FEW)
    assert (report.title, report.about["looked at"]) == ("LTXPipeline", "forward 2 of 3, seed 0")
    assert called(report) == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert report.look.order is not None
    assert report.look.order["grid"] == GRID

    def sample(seed: int) -> Any:
        return pipe(**asked, generator=torch.Generator().manual_seed(seed), output_type="np").frames[0]

    pair = compare_samples(sample, [0], {"few": lambda: sparge.patch(pipe, FEW)})["few"][0]
    assert report.samples[0]["psnr"] == pytest.approx(pair.psnr, rel=1e-3)
    assert report.samples[0]["ssim"] == pytest.approx(pair.ssim)
    assert report.vision[0]["seeds"] == len(report.samples) == 2
    assert report.vision[0]["skipped"] == pytest.approx(1 - pair.executed / pair.visible)
    assert f"samples of 2 seeds, PSNR {report.vision[0]['psnr']:.2f} dB" in "".join(report.lines())
    assert report.whole is not None
    assert "medians of 5 dense and 5 sparse ones" in report.whole.measured  # without the first of each
    assert (tmp_path / "page.html").read_text().count('<img src="data:image/jpeg;base64,') == 6


def test_both_transformers_of_a_pipeline(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    from small_diffusers import SMALL

    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    wan = SMALL["wan"]
    pipe = diffusers.WanPipeline(
        **parts, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=wan.built(),
        transformer_2=wan.built(), boundary_ratio=0.8,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    prompts = {"prompt_embeds": torch.ones(1, 7, 16), "negative_prompt_embeds": torch.zeros(1, 7, 16)}

    def denoise(seed: int) -> None:
        size = {"height": 96, "width": 160, "num_frames": 9}
        pipe(**prompts, **size, num_inference_steps=4, output_type="latent", guidance_scale=1.0)

    report = report_model(pipe, denoise, tmp_path / "page.html", FEW, seeds=1)
    assert [name.partition(".")[0] for name in called(report)] == 2 * ["transformer"] + 2 * ["transformer_2"]
    assert report.about["looked at"] == "forward 2 of 2 of transformer and forward 2 of 2 of transformer_2"


# ---- models of one's own


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    model = Own()
    report = report_model(model, model.sample, tmp_path / "page.html", FEW, seeds=3, grid=GRID, title="mine")
    assert report.title == "mine"
    assert called(report) == ["blocks.0", "blocks.1"]
    assert [len(layer.error) for layer in report.layers] == [4, 4]
    assert report.about["looked at"] == "forward 3 of 4, seed 0"
    assert report.settings == "rule=topk, topk=0.3, subblocks=1x1, quantization=none, block=64x32, sinks=0"
    assert report.look.order is not None
    assert report.look.order["grid"] == GRID
    with torch.no_grad():
        pair = compare_samples(model.sample, [0], {"few": lambda: sparge.patched(FEW)})["few"][0]
    assert report.samples[0]["psnr"] == pytest.approx(pair.psnr, rel=1e-3)
    assert report.dense_layers() == []


def test_calls_of_ones_own_model_that_stay_dense(tmp_path: Path) -> None:
    model = Own()
    report = report_model(model, model.sample, tmp_path / "page.html")  # too short to gain
    assert report.layers == []
    assert report.dense_layers()[0]["layers"] == "blocks.0 to blocks.1"
    assert "too short to gain" in report.dense_layers()[0]["why"]
    assert report.vision[0]["psnr"] is None


def test_a_model_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from small_models import built, llama, tokens

    model = built(llama)
    report = report_model(model, {"input_ids": tokens()}, tmp_path / "page.html", FEW)
    assert called(report) == [layer.name for layer in sparge.patch(model, dry_run=True).layers]
    assert report.look.order is None


# ---- what else can happen


def test_several_calls_of_a_layer_are_taken_together() -> None:
    found: list[LayerFindings] = []
    with inside.observed(lambda run: found.append(look_at(run, "one", 8))):
        for seed in range(2):
            q = torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(seed))
            sparge.attention(q, q, q, config=FEW)
    both = together(found)
    assert both.visible == [2 * count for count in found[0].visible]
    assert both.error == pytest.approx([(a + b) / 2 for a, b in zip(found[0].error, found[1].error, strict=True)])
    assert both.seconds.dense == found[0].seconds.dense + found[1].seconds.dense
    assert together(found[:1]) is found[0]


@pytest.mark.parametrize(("at", "seeds", "layers"), [(5, 0, 0), (9, 1, 0), (17, 2, 0), (None, 2, 1)])
def test_ctrl_c_keeps_what_was_done(at: int | None, seeds: int, layers: int, tmp_path: Path, monkeypatch: Any) -> None:
    model, forwards = Own(), 0

    def stop(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == at:
            raise KeyboardInterrupt

    def look(*arguments: Any) -> LayerFindings:
        if done:
            raise KeyboardInterrupt
        done.append(arguments[1])
        return look_at(*arguments)

    done: list[str] = []
    monkeypatch.setattr(inside, "look_at", look)
    hook = model.register_forward_pre_hook(stop)
    report = report_model(model, model.sample, tmp_path / "page.html", FEW)
    hook.remove()
    assert report.interrupted
    assert (len(report.samples), len(report.layers)) == (seeds, layers)
    assert all("rest" not in way["parts"] for way in report.time_split())
    assert "The run was interrupted" in (tmp_path / "page.html").read_text()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"seeds": 0}, ValueError, "seeds"),
        ({"forward": 5}, ValueError, "from 1 to 4"),
        ({"grid": (4, 8, 8)}, ValueError, "(4, 8, 8)"),
        ({"dense_steps": 1}, ValueError, "Own is no model of diffusers"),
        ({"dense_layers": 1}, ValueError, "knows no layer of Own"),
        ({"run": 3}, TypeError, "a function of a seed, not int"),
        ({"run": lambda seed: torch.zeros(8, 8, 3)}, SampleError, "never called Own"),
        ({"run": lambda seed: Own.sample(Own.last, seed) * 9}, SampleError, "floats from 0 to 1"),
        ({"model": "flux"}, TypeError, "not str"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    more: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    model = Own.last = Own()  # type: ignore[attr-defined]
    arguments = {"model": model, "run": model.sample, "out": tmp_path / "page.html", "config": FEW, **more}
    with refused(kind, words):
        report_model(**arguments)
    assert not (tmp_path / "page.html").exists()


def test_a_patched_model_is_refused(tmp_path: Path) -> None:
    model = Own()

    def sample(seed: int) -> Tensor:
        with sparge.patched(FEW):
            return model.sample(seed)

    with refused(SampleError, "unpatch"):
        report_model(model, sample, tmp_path / "page.html", FEW)


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    whole, inner = torch.compile(Own(), backend="eager"), Own()
    inner.blocks[0].compile(backend="eager")
    for model in (whole, inner):
        with refused(ValueError, "Own", "compiled"):
            report_model(model, {"x": torch.randn(1, 192, 16)}, tmp_path / "page.html")


def test_a_pipelines_seed_is_the_reports(pipe: Any, tmp_path: Path) -> None:
    with refused(ValueError, "generator", "leave them out"):
        report_model(pipe, {"prompt": "a", "generator": torch.Generator()}, tmp_path / "page.html")
    with refused(ValueError, "grid", "one's own"):
        report_model(pipe, {"prompt": "a"}, tmp_path / "page.html", grid=GRID)
