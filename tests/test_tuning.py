"""Tuning: bounds are kept, one budget buys more than equal bounds, stopped searches go on, errors are clear."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import EXACT, problem, randn, refused, relative_l1, tensors
from torch import Tensor

from sparge import Profile, SparseConfig, attention, predict_mask, tune
from sparge.profile import ProfileError
from sparge.tuning import survey as survey_module
from sparge.tuning.choose import within_bound, within_budget
from sparge.tuning.gradients import sensitivity
from sparge.tuning.journal import Journal, JournalError, digest
from sparge.tuning.ladder import COARSE, EVERYTHING, settings_at
from sparge.tuning.measure import exact_output, measure, sample_blocks
from sparge.tuning.subjects import differentiable_attention
from sparge.visibility import Visibility

LENGTH, HEADS = 640, 3


def layer_inputs(item: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """The second layer is flatter: the same error saves fewer blocks there."""
    return tensors(10 * item + layer, heads=HEADS, q_len=LENGTH, contrast=(6.0, 3.0)[layer])


def two_layers(item: int, attend: Any) -> None:
    """A model of two layers that share nothing; the second one's outputs are a hundred times smaller."""
    for layer, size in enumerate((1.0, 0.01)):
        q, k, v = layer_inputs(item, layer)
        attend(f"layers.{layer}", q, k, v * size, is_causal=True)


def true_errors(profile: Profile, inputs: list[int]) -> dict[str, Tensor]:
    """Relative L1 per head over all inputs, from the public function."""
    errors = {}
    for layer in range(2):
        config, off, size = profile.config_for(f"layers.{layer}"), 0, 0
        for item in inputs:
            q, k, v = layer_inputs(item, layer)
            want = attention(q, k, v, is_causal=True, config=EXACT).double()
            # Left to "auto", calls as short as these would be dense.
            got = attention(q, k, v, is_causal=True, config=replace(config, quantization="none")).double()
            off, size = off + (got - want).abs().sum((0, 2, 3)), size + want.abs().sum((0, 2, 3))
        errors[f"layers.{layer}"] = off / size
    return errors


# ---- the ladder


@pytest.mark.parametrize("rule", ["threshold", "gap", "cdf", "topk", ("threshold", "gap"), ("topk", "cdf")])
def test_strictness_keeps_fewer_blocks_and_at_its_lowest_all(rule) -> None:
    q, k, _ = layer_inputs(0, 0)
    base, kept = SparseConfig(rule=rule), []
    for step in COARSE:
        settings: dict[str, Any] = settings_at(base, torch.full((HEADS,), step, dtype=torch.float64))
        assert set(settings) == set(base.rule)
        mask = predict_mask(q, k, is_causal=True, config=SparseConfig(rule=rule, **settings))
        kept.append(mask.kept_per_head[0])
    assert torch.equal(kept[0], mask.visible_per_head[0])
    assert all(bool((fewer <= more).all()) for more, fewer in pairwise(kept))
    assert bool((kept[-1] < kept[0]).all())


def test_strictness_zero_is_the_config_and_heads_move_apart() -> None:
    base = SparseConfig(rule=("threshold", "gap"), gap=(4.0, 5.0, 6.0))
    found = settings_at(base, torch.tensor([0.0, 1.0, EVERYTHING], dtype=torch.float64))
    assert found["threshold"] == pytest.approx((0.003, 0.003 * 2.718281828, 0.0))
    assert found["gap"] == (4.0, 4.0, 1e4)


# ---- measuring


def test_measured_on_all_rows_is_the_true_error() -> None:
    q, k, v = layer_inputs(0, 0)
    inputs = problem(q, k, v, is_causal=True)
    config = SparseConfig(rule=("threshold", "gap"), gap=(2.0, 1.0, 0.5), threshold=0.5, quantization="none")
    found = measure(inputs, exact_output(inputs), [config, EXACT], share=1.0, seed=0)
    got, stats = attention(q, k, v, is_causal=True, config=config, return_stats=True)
    want = attention(q, k, v, is_causal=True, config=EXACT)
    for head in range(HEADS):
        assert found.relative_l1[0, head].item() == pytest.approx(relative_l1(got[:, head], want[:, head]), rel=1e-3)
    assert torch.equal(found.executed[0].long(), stats.executed[0])
    assert torch.equal(found.visible.long(), stats.visible[0])
    assert found.relative_l1[1].max() < 1e-6
    assert found.relative_l1[0].min() > 1e-3


def test_the_second_stage_is_counted() -> None:
    inputs = problem(*layer_inputs(0, 0), is_causal=True)
    settings = [SparseConfig(pv_threshold=value) for value in (-1e4, -0.5)]
    found = measure(inputs, exact_output(inputs), settings, share=1.0, seed=0)
    assert bool((found.products[1] < found.products[0]).all())
    assert torch.equal(found.executed[0], found.executed[1])
    assert bool((found.absolute_error[1] > found.absolute_error[0]).all())


def test_sampled_blocks_are_spread_and_repeatable() -> None:
    chosen = sample_blocks(64, 0.25, seed=3)
    assert torch.equal(chosen, sample_blocks(64, 0.25, seed=3))
    assert not torch.equal(chosen, sample_blocks(64, 0.25, seed=4))
    assert [block // 4 for block in chosen.tolist()] == list(range(16))
    assert sample_blocks(5, 1.0, seed=0).tolist() == list(range(5))
    assert len(sample_blocks(1, 0.01, seed=0)) == 1


# ---- choosing


def test_within_bound_takes_the_least_work() -> None:
    work = torch.tensor([[9.0, 9, 9], [5, 5, 5], [1, 1, 1]])
    error = torch.tensor([[0.0, 0, 0.3], [0.1, 0.3, 0.2], [0.2, 0.1, 0.4]])
    assert within_bound(work, error, 0.15).tolist() == [1, 2, 1]  # the last head has nothing within: its least error


@pytest.mark.parametrize("budget", [0.05, 0.5, 2.0, 20.0])
def test_within_budget_is_close_to_the_best_of_all_choices(budget: float) -> None:
    generator = torch.Generator().manual_seed(1)
    work = torch.rand(4, 5, generator=generator).sort(0, descending=True).values * 100
    damage = torch.rand(4, 5, generator=generator).sort(0).values * torch.tensor([0.01, 0.1, 1, 3, 10])
    damage[0] = 0
    heads = torch.arange(5)
    every = torch.cartesian_prod(*[torch.arange(4)] * 5)
    allowed = damage[every, heads].sum(1) <= budget
    best = work[every, heads].sum(1)[allowed].min()
    for scale in (1.0, 1e-20):  # squared gradients may be tiny
        chosen = within_budget(work, damage * scale, budget * scale)
        assert damage[chosen, heads].sum() <= budget
        assert work[chosen, heads].sum() <= best * 1.15 + 1e-9


def test_without_a_budget_the_least_damage_is_chosen() -> None:
    work, damage = torch.tensor([[2.0, 2], [1, 1]]), torch.tensor([[1.0, 5], [2, 4]])
    assert within_budget(work, damage, 0.0).tolist() == [0, 1]
    assert within_budget(work, damage, 1e-3).tolist() == [0, 1]


# ---- the search


@pytest.mark.parametrize("l1", [0.02, 0.1])
def test_every_head_is_within_its_bound(l1: float) -> None:
    profile = tune(two_layers, [0, 1], l1=l1, spend="head", share=1.0)
    assert list(profile.layers) == ["layers.0", "layers.1"]
    for name, errors in true_errors(profile, [0, 1]).items():
        assert errors.max() <= l1 * 1.001
        assert errors.tolist() == pytest.approx(profile.layers[name].error, rel=1e-3)
        assert errors.max() > l1 / 4  # and not by keeping everything
    assert 0 < profile.executed < 1
    assert profile.metrics["l1"] == l1
    assert profile.metrics["executed"] == pytest.approx(profile.executed)


def test_a_looser_bound_computes_less() -> None:
    strict, loose = (tune(two_layers, [0], l1=l1, spend="head", share=1.0).executed for l1 in (0.02, 0.2))
    assert loose < strict


def test_one_budget_computes_less_than_equal_bounds() -> None:
    equal, budget = (tune(two_layers, [0, 1], l1=0.05, spend=spend, share=1.0) for spend in ("head", "model"))
    assert budget.executed < equal.executed


def test_the_loss_decides_where_the_budget_goes() -> None:
    """A loss that depends on the first layer only leaves nothing to protect in the second."""

    def loss(item: int, attend: Any) -> Tensor:
        q, k, v = layer_inputs(item, 0)
        first = attend("layers.0", q, k, v, is_causal=True)
        q, k, v = layer_inputs(item, 1)
        return first.square().sum() + 1e-4 * attend("layers.1", q, k, v * 0.01, is_causal=True).sum()

    profile = tune(two_layers, [0], l1=0.05, share=1.0, loss=loss)
    spent = {name: max(layer.error) for name, layer in profile.layers.items()}
    assert spent["layers.1"] > 2 * spent["layers.0"]


def test_the_second_stage_stays_within_its_bound() -> None:
    profile = tune(two_layers, [0], l1=0.03, l2=0.06, spend="head", share=1.0)
    first = tune(two_layers, [0], l1=0.03, spend="head", share=1.0)
    for name, errors in true_errors(profile, [0]).items():
        assert errors.max() <= 0.06 * 1.001
        assert len(profile.layers[name].settings["pv_threshold"]) == HEADS
        assert profile.layers[name].settings["gap"] == first.layers[name].settings["gap"]
    chosen = [value for layer in profile.layers.values() for value in layer.settings["pv_threshold"]]
    assert max(chosen) > -13  # some head uses it


def test_tuned_with_the_config_of_inference() -> None:
    config = SparseConfig(rule="cdf", subblocks=(1, 1), similarity=0.1, sinks=2, block=(64, 32))
    profile = tune(two_layers, [0], l1=0.05, spend="head", share=1.0, config=config)
    tuned = profile.config_for("layers.0")
    assert isinstance(tuned.cdf, tuple)
    assert (tuned.rule, tuned.subblocks, tuned.similarity, tuned.sinks, tuned.block) == (
        ("cdf",), (1, 1), 0.1, 2, (64, 32),
    )  # fmt: skip
    assert true_errors(profile, [0])["layers.0"].max() <= 0.05 * 1.001


def test_layers_called_several_times_and_grouped_heads_in_either_layout() -> None:
    def run(item: int, attend: Any) -> None:
        for _ in range(2):
            q, k, v = (x.transpose(1, 2) for x in tensors(item, heads=4, kv_heads=2, q_len=300, contrast=6.0))
            out = attend("only", q, k, v, enable_gqa=True, layout="BSHD", window=(100, 100))
            want = attention(q, k, v, enable_gqa=True, layout="BSHD", window=(100, 100), config=EXACT)
            assert torch.equal(out, want)

    assert tune(run, [0, 1], l1=0.05).layers["only"].heads == 4


# ---- going on after a stop


def test_a_stopped_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(two_layers, [0, 1], l1=0.05)
    path, measured = tmp_path / "journal", []

    def stop_after(limit: int) -> None:
        def on_step(stage: str, layer: str) -> None:
            measured.append((stage, layer))
            if len(measured) >= limit:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tune(two_layers, [0, 1], l1=0.05, journal=path, on_step=on_step)

    counted, calls = survey_module.measure, []
    monkeypatch.setattr(survey_module, "measure", lambda *args: calls.append(1) or counted(*args))
    stop_after(3)
    stop_after(6)
    text = path.read_text()
    path.write_text(text[:-30])  # as if the last line had been cut off
    assert tune(two_layers, [0, 1], l1=0.05, journal=path) == whole
    assert len(calls) <= 8 + 1  # two passes, two inputs, two layers; one line was lost
    calls.clear()
    assert tune(two_layers, [0, 1], l1=0.05, journal=path) == whole
    assert not calls
    tune(two_layers, [0, 1], l1=0.1, journal=path)
    assert 0 < len(calls) <= 4  # another bound needs the fine pass only


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tune(two_layers, [0], journal=path)
    for change in ({"inputs": [1]}, {"config": SparseConfig(sinks=3)}, {"seed": 1}, {"name": "other"}, {"share": 1.0}):
        before = path.read_bytes()
        with refused(JournalError, "journal of this run"):
            tune(two_layers, **{"inputs": [0], "journal": path, **change})
        assert path.read_bytes() == before


def test_a_journal_of_other_weights_is_refused(tmp_path: Path) -> None:
    small = pytest.importorskip("small_models")
    path, ids = tmp_path / "journal", torch.randint(0, 50, (1, 64))
    model = small.built(small.llama)
    config = SparseConfig(rule="topk", topk=0.3, quantization="none")
    found = tune(model, [ids], config=config, l1=0.3, journal=path)
    assert tune(model, [ids], config=config, l1=0.3, journal=path) == found
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with refused(JournalError, "other model"):
        tune(model, [ids], config=config, l1=0.3, journal=path)
    with refused(JournalError, "other model"):
        tune(small.built(small.llama).bfloat16(), [ids], config=config, l1=0.3, journal=path)


def test_settings_per_head_must_fit_the_layers() -> None:
    config = SparseConfig(rule="gap", gap=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], quantization="none")
    with refused(ValueError, "gap has 7 values"):
        tune(two_layers, [0], config=config, l1=0.1)


@pytest.mark.parametrize("seed", ["x", 1.0, True])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with refused(TypeError, "seed must be an integer"):
        tune(two_layers, [0], seed=seed)


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    tune(two_layers, [0], journal=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "not JSON", *lines[2:]]))
    with refused(JournalError, "line 2"):
        tune(two_layers, [0], journal=path)
    key, _ = json.loads(lines[1])
    for value in (None, [], [[1]] * 7, "x"):
        path.write_text("\n".join([lines[0], json.dumps([key, value]), *lines[2:]]))
        with refused(JournalError, "damaged"):
            tune(two_layers, [0], journal=path)


def test_a_journal_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Journal(None, {}).add("a", 1)
    assert not list(tmp_path.iterdir())


def test_digest_sees_every_tensor() -> None:
    x = randn(0, 4)
    same = digest([{"ids": x}, [x, 1]])
    assert same == digest([{"ids": x.clone()}, [x, 1]])
    assert same != digest([{"ids": x + 1}, [x, 1]])
    assert same != digest([{"ids": x}, [x, 2]])


# ---- what it cannot do


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ValueError, {"l1": 0.0}, "l1"),
        (ValueError, {"l1": float("nan")}, "l1"),
        (ValueError, {"l1": 0.05, "l2": 0.04}, "more than l1"),
        (TypeError, {"l1": "0.05"}, "l1 must be a number"),
        (TypeError, {"share": True}, "share must be a number"),
        (ValueError, {"config": SparseConfig(max_error=0.1)}, "max_error"),
        (ValueError, {"spend": "everywhere"}, "spend"),
        (ValueError, {"share": 0.0}, "share"),
        (ValueError, {"l2": 0.06, "config": SparseConfig(pv_threshold=-5.0)}, "pv_threshold"),
        (TypeError, {"config": {"gap": 3}}, "SparseConfig"),
        (TypeError, {"inputs": []}, "inputs"),
        (TypeError, {"inputs": torch.zeros(3)}, "inputs"),
        (TypeError, {"model": 3}, "function"),
        (TypeError, {"model": torch.nn.Linear(1, 1)}, "attend"),
        (ValueError, {"model": lambda item, attend: None}, "nothing to tune"),
    ],
)
def test_what_cannot_be_tuned_is_refused(kind: type[Exception], arguments: dict[str, Any], words: str) -> None:
    with refused(kind, words):
        tune(**{"model": two_layers, "inputs": [0], **arguments})


def test_layers_that_cannot_be_saved_are_refused_at_once() -> None:
    q, k, v = layer_inputs(0, 0)
    for name in (3, "", "\x1b[2J"):
        with refused(ProfileError, "printable"):
            tune(lambda item, attend, name=name: attend(name, q, k, v), [0])
    with refused(ValueError, "'a'", "not finite"):
        tune(lambda item, attend: attend("a", q, k, v / 0), [0])


# ---- sensitivity


@pytest.mark.parametrize(
    "arguments", [{}, {"is_causal": True}, {"window": (20, 5)}, {"layout": "BSHD", "is_causal": True}]
)
def test_attention_with_a_gradient_is_the_same_attention(arguments: dict[str, Any]) -> None:
    q, k, v = tensors(heads=4, kv_heads=2, q_len=90)
    if arguments.get("layout") == "BSHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = attention(q, k, v, enable_gqa=True, config=EXACT, **arguments)
    got = differentiable_attention(q, k, v, enable_gqa=True, **arguments)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=str)
def test_what_torch_can_say_needs_no_mask(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = layer_inputs(0, 0)
    monkeypatch.setattr(Visibility, "pairs", lambda *_: pytest.fail("a matrix of all pairs was made"))
    differentiable_attention(q, k, v, **arguments)


def test_sensitivity_is_the_mean_squared_gradient() -> None:
    q, k, v = tensors(heads=2, q_len=50)
    pull = randn(9, *v.shape) * torch.tensor([1.0, 3.0])[:, None, None]
    found = sensitivity(lambda _, attend: (attend("a", q, k, v) * pull).sum(), [0, 1], lambda: None)
    torch.testing.assert_close(found["a"], 2 * pull.double().square().mean((0, 2, 3)))


def test_sensitivity_does_not_depend_on_the_layout() -> None:
    q, k, v = (randn(n, 1, 3, 40, 16) for n in range(3))
    pull = randn(3, 1, 3, 40, 16)

    def heads_last(_: object, attend: Any) -> torch.Tensor:
        out = attend("a", *(x.transpose(1, 2) for x in (q, k, v)), layout="BSHD")
        return (out.transpose(1, 2) * pull).sum()

    want = sensitivity(lambda _, attend: (attend("a", q, k, v) * pull).sum(), [0], lambda: None)
    torch.testing.assert_close(sensitivity(heads_last, [0], lambda: None)["a"], want["a"])
