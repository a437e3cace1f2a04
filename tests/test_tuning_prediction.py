"""Tuning judged by the model's output: the budget is kept, less is computed, stopped searches go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import EXACT, refused, tensors
from torch import Tensor

from sparge import Profile, SparseConfig, attention, predict_mask, tune
from sparge.inputs import prepare_inputs
from sparge.tuning.choose import within_budget
from sparge.tuning.gradients import drawn_gradients
from sparge.tuning.journal import JournalError
from sparge.tuning.ladder import GAP_STEPS, PV_OFF, SHARE_STEPS, grid
from sparge.tuning.measure import Gradient, exact_output, measure, measured_rows
from sparge.tuning.prediction import CORRECTIONS, steps_of
from sparge.tuning.subjects import exact_attention, subject_of

GIVEN = SparseConfig(rule=("threshold", "gap"), threshold=0.02, gap=3.0)
LAYERS = [f"layers.{layer}" for layer in range(4)]
SIZES = (1.0, 1.0, 10.0, 1.0)
INPUTS = [0, 1]


def layer_inputs(item: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensors(10 * item + layer, heads=3, q_len=640, contrast=6.0)
    return q, k, v * SIZES[layer]


def chain(item: int, attend: Any) -> Tensor:
    """Outputs of four layers, added up; the third one's is ten times as large, and with it what an error there does."""
    outputs = [attend(name, *layer_inputs(item, layer), is_causal=True) for layer, name in enumerate(LAYERS)]
    return torch.stack(outputs).sum(0)


def with_configs(config_for: Callable[[str], SparseConfig]) -> Callable[..., Tensor]:
    """Left to "auto", calls as short as these would be dense."""
    return lambda layer, *qkv, **more: attention(*qkv, config=replace(config_for(layer), quantization="none"), **more)


def moved(config_for: Callable[[str], SparseConfig]) -> float:
    """The relative squared error of the chain's output, mean over the inputs."""
    total = 0.0
    for item in INPUTS:
        want = chain(item, with_configs(lambda _: EXACT)).double()
        off = chain(item, with_configs(config_for)).double() - want
        total += float(off.square().sum() / want.square().sum()) / len(INPUTS)
    return total


def executed_as_given() -> float:
    masks = [
        predict_mask(*layer_inputs(item, layer)[:2], is_causal=True, config=GIVEN)
        for item in INPUTS
        for layer in range(len(LAYERS))
    ]
    return sum(int(mask.kept_per_head.sum()) for mask in masks) / sum(
        int(mask.visible_per_head.sum()) for mask in masks
    )


def test_no_more_harm_than_the_config_for_fewer_blocks() -> None:
    profile = tune(chain, INPUTS, spend="prediction", config=GIVEN, share=1.0)
    assert profile.metrics["allowed"] == pytest.approx(moved(lambda _: GIVEN), rel=0.01)
    assert profile.metrics["divergence"] == pytest.approx(moved(profile.config_for), rel=0.01)
    assert profile.metrics["divergence"] <= profile.metrics["allowed"]
    assert profile.metrics["executed"] < 0.96 * executed_as_given()
    gaps = [profile.layers[name].settings["gap"][0] for name in LAYERS]
    assert gaps[2] > max(gaps[0], gaps[1], gaps[3])  # where an error does most harm


def test_shares_and_errors_of_heads_are_those_of_the_settings() -> None:
    profile = tune(chain, INPUTS, spend="prediction", config=GIVEN, share=1.0)
    for layer, name in enumerate(LAYERS):
        off = size = done = seen = torch.zeros(3, dtype=torch.float64)
        for item in INPUTS:
            q, k, v = layer_inputs(item, layer)
            want = attention(q, k, v, is_causal=True, config=EXACT).double()
            config = replace(profile.config_for(name), quantization="none")
            got, stats = attention(q, k, v, is_causal=True, config=config, return_stats=True)
            off, size = off + (got - want).abs().sum((0, 2, 3)), size + want.abs().sum((0, 2, 3))
            done, seen = done + stats.executed[0], seen + stats.visible[0]
        assert profile.layers[name].error == pytest.approx((off / size).tolist(), rel=0.01)
        assert profile.layers[name].executed == pytest.approx((done / seen).tolist())


def test_the_budget_decides() -> None:
    """More harm, fewer blocks; and where nothing sparse is good enough, everything."""
    budgets = (1e-14, 1e-4, 1e-2, 1e9)
    found = [tune(chain, [0], spend="prediction", config=GIVEN, divergence=budget).metrics for budget in budgets]
    executed = [metrics["executed"] for metrics in found]
    assert executed[0] == 1.0
    assert executed == sorted(executed, reverse=True)
    assert executed[1] > executed[2] > executed[3]
    assert all(metrics["divergence"] <= max(1e-10, budget) for metrics, budget in zip(found, budgets, strict=True))


def test_gradients_say_what_an_error_does() -> None:
    """Half the mean of (g . e)^2 is the relative square of what the error adds to the output."""
    subject = subject_of(lambda item, attend: 3 * attend("a", *layer_inputs(0, 0), is_causal=True), None, None)
    output, found = drawn_gradients(subject, 0, GIVEN, 1.0, seed=5)
    draws = torch.cat([drawn_gradients(subject, 0, GIVEN, 1.0, seed=seed)[1]["a", 0].drawn for seed in range(100)])
    assert found["a", 0].drawn.shape[1:] == output.shape == (1, 3, 640, 16)
    assert found["a", 0].loss is None
    error = torch.randn(output.shape, generator=torch.Generator().manual_seed(1000))
    said = (draws * error).sum((1, 2, 3, 4)).square().mean() / 2
    assert float(said) == pytest.approx(float((3 * error).square().sum() / output.square().sum()), rel=0.3)


def test_small_gradients_survive_half_precision() -> None:
    """The output is large, so directions are small; in float16 their gradients would round to 0."""

    def scaled(item: int, attend: Any) -> Tensor:
        q, k, v = (x.half() for x in layer_inputs(0, 0))
        return 1e-4 * attend("a", q, k, v, is_causal=True) + 1e3

    _, found = drawn_gradients(subject_of(scaled, None, None), 0, GIVEN, 1.0, seed=5)
    assert (found["a", 0].drawn != 0).float().mean() > 0.9


def test_a_divergence_asks_for_the_search_by_prediction() -> None:
    assert tune(chain, [0], config=GIVEN, divergence=1e-2).metrics["allowed"] == 1e-2


def test_gradients_are_of_the_rows_that_are_measured() -> None:
    subject = subject_of(chain, None, None)
    (_, whole), (_, some) = (drawn_gradients(subject, 0, GIVEN, share, seed=2) for share in (1.0, 0.7))
    all_rows, few_rows = whole["layers.1", 0].drawn, some["layers.1", 0].drawn
    assert few_rows.shape[3] == 384  # three of five blocks
    kept = [(all_rows[..., row, :] == few_rows[..., 0, :]).all() for row in range(640)]
    assert sum(map(int, kept)) == 1


def test_the_grid_begins_with_the_config_and_with_everything() -> None:
    tried = grid(GIVEN, 2)
    assert tried[0] == {"threshold": (0.02, 0.02), "gap": (3.0, 3.0)}
    assert tried[1]["gap"] == (1e4, 1e4)
    assert len({str(one) for one in tried}) == len(tried) == 1 + len(SHARE_STEPS) * len(GAP_STEPS)
    alone = grid(SparseConfig(rule="cdf"), 1)
    assert [one["cdf"][0] for one in alone[2:]] == sorted((one["cdf"][0] for one in alone[2:]), reverse=True)


def test_the_share_is_drawn_with_the_seed() -> None:
    allowed = [
        tune(chain, [0], spend="prediction", config=GIVEN, share=share, seed=seed).metrics["allowed"]
        for share, seed in ((1.0, 0), (1.0, 1), (0.25, 0), (0.25, 1))
    ]
    assert allowed[0] == allowed[1]
    assert len(set(allowed)) == 3
    assert allowed[2:] == pytest.approx(allowed[:2], rel=0.5)  # of 480 rows


def test_steps_are_counted() -> None:
    steps: list[str] = []
    tune(chain, [0], spend="prediction", config=GIVEN, on_step=lambda stage, layer: steps.append(stage))
    assert steps[:6] == ["gradients", "heads", "heads", "heads", "heads", "as given"]
    assert steps_of(len(LAYERS)) - CORRECTIONS - 1 <= len(steps) <= steps_of(len(LAYERS))  # float32 needs a run less


def test_a_stopped_search_goes_on(tmp_path: Path) -> None:
    runs = 0

    def counted(item: int, attend: Any) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 4:
            raise KeyboardInterrupt
        return chain(item, attend)

    arguments: dict[str, Any] = {"spend": "prediction", "config": GIVEN, "name": "chain"}
    journal = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        tune(counted, [0], journal=journal, **arguments)
    runs = 100
    resumed = tune(counted, [0], journal=journal, **arguments)
    saved, runs = runs, 100
    assert resumed.layers == tune(counted, [0], **arguments).layers
    assert saved == runs - 2  # gradients, layers and one run are known; the dense run is made again
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:-1], lines[-1].rsplit(",", 1)[0] + ", -5.0]", ""]))
    with refused(JournalError, "damaged"):
        tune(chain, [0], journal=journal, **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ValueError, {"l1": 0.02}, "divergence instead"),
        (ValueError, {"l2": 0.05}, "divergence instead"),
        (ValueError, {"loss": lambda item, attend: torch.zeros(())}, "divergence instead"),
        (ValueError, {"divergence": 0.0}, "above 0"),
        (TypeError, {"divergence": "0.1"}, "a number"),
        (ValueError, {"spend": "head", "divergence": 0.1}, "spend='prediction'"),
        (TypeError, {"model": lambda item, attend: None}, "must return it as a tensor"),
        (ValueError, {"model": lambda item, attend: torch.zeros(1)}, "nothing to tune"),
        (ValueError, {"model": lambda item, attend: chain(item, attend).detach()}, "spend='model'"),
    ],
)
def test_what_cannot_be_asked_is_refused(kind: type[Exception], arguments: dict[str, Any], words: str) -> None:
    with refused(kind, words):
        tune(**{"model": chain, "inputs": [0], "spend": "prediction", **arguments})


def test_a_profile_is_saved_and_read(tmp_path: Path) -> None:
    profile = tune(chain, [0], spend="prediction", config=GIVEN)
    profile.save(tmp_path / "chain.safetensors")
    assert Profile.load(tmp_path / "chain.safetensors").metrics == profile.metrics


# ---- models whose inputs say what is to be predicted


def test_the_gradient_of_the_loss_says_what_an_error_adds_to_it() -> None:
    """Of two texts of different tokens; the last tokens of both predict nothing."""
    small_models = pytest.importorskip("small_models")
    torch.manual_seed(0)
    model, item = small_models.llama().eval(), torch.randint(3, 64, (2, 200))
    layer, subject = "model.layers.0.self_attn", subject_of(model, None, None)
    error: Tensor | None = None

    def attend(name: str, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        output = exact_attention(name, query, key, value, **more)
        return output if error is None or name != layer else output + error

    def loss() -> Tensor:
        with torch.no_grad():
            logits = model.lm_head(subject.predict(item, attend)).unflatten(0, (2, 200))
        return torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), item[:, 1:].flatten())

    output, found = drawn_gradients(subject, item, GIVEN, 1.0, seed=0)
    gradient, before = found[layer, 0], loss()
    assert len(gradient.drawn) == 0  # on a CPU
    assert gradient.loss is not None
    assert gradient.loss.shape == (2, 4, 200, 16)
    error = 1e-3 * torch.randn(gradient.loss.shape, generator=torch.Generator().manual_seed(1))
    error = error + 0.1 * gradient.loss / gradient.loss.abs().amax() * error.abs().amax()
    assert float(loss() - before) == pytest.approx(float((gradient.loss * error).sum()), rel=0.05)
    assert gradient.energy == pytest.approx(gradient.loss.double().square().mean((2, 3)) * len(output))
    subject.close()


def test_heads_whose_errors_help_are_preferred() -> None:
    """Both save as much for as much damage; the budget lets one of them."""
    work, damage = torch.tensor([[2.0, 2], [1, 1]]), torch.tensor([[0.0, 0], [1, 1]])
    for helped in (0, 1):
        aside = torch.zeros(2, 2)
        aside[1, helped] = -0.1
        assert within_budget(work, damage, 1.0, aside).tolist() == [1 - helped, helped]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_candidates_measured_at_once_are_as_measured_one_by_one(share: float) -> None:
    """A second stage that skips nothing has candidates run one by one."""
    q, k, v = tensors(4, batch=2, heads=4, kv_heads=2, q_len=700, contrast=6.0)
    inputs = prepare_inputs(q, k, v, is_causal=True, enable_gqa=True)
    rows = len(measured_rows(700, 128, share, 9))
    generator = torch.Generator().manual_seed(5)
    drawn, loss = torch.randn(3, 2, 4, rows, 16, generator=generator), torch.randn(2, 4, rows, 16, generator=generator)
    candidates = [replace(GIVEN, gap=gap, quantization="none") for gap in (1.0, 2.0, 3.0)]
    alone = [replace(one, pv_threshold=PV_OFF) for one in candidates]
    exact, gradient = exact_output(inputs), Gradient(drawn, loss, 1400)
    at_once, one_by_one = (measure(inputs, exact, which, share, 9, gradient) for which in (candidates, alone))
    for got, want in zip(at_once.parts(), one_by_one.parts(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert bool((at_once.absolute_error > 0).all())
    assert bool((at_once.moved > 0).all())
    assert bool((at_once.loss != 0).all())
