"""Settings of a model of diffusers are searched like those of any other, and fit the patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import refused
from small_diffusers import SMALL, output

import sparge

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", ["hunyuan", "sd3"])
def test_a_profile_tuned_on_the_model_fits_it(name: str) -> None:
    one = SMALL[name]
    model = one.built()
    want = output(model, **one.inputs)
    small = sparge.SparseConfig(block=(64, 32), sinks=0, quantization="none")
    profile = sparge.tune(model, [one.inputs], l1=0.2, spend="head", config=small)
    assert torch.equal(output(model, **one.inputs), want)  # nothing is left on it
    assert profile.model == one.kind
    assert profile.executed < 1
    plan = sparge.patch(model, profile=profile).plan
    assert {layer.name for layer in plan.layers if layer.action == "sparse"} == set(profile.layers)
    assert not torch.allclose(output(model, **one.inputs), want, atol=1e-4)


def test_layers_are_judged_by_the_models_output() -> None:
    one = SMALL["hunyuan"]
    model = one.built()
    small = sparge.SparseConfig(
        rule=("threshold", "gap"), block=(64, 32), sinks=0, quantization="none", threshold=0.1, gap=1.0
    )
    profile = sparge.tune(model, [one.inputs], config=small, divergence=0.01)
    assert profile.metrics["divergence"] <= 0.01
    assert profile.executed < 1
    want = output(model, **one.inputs)
    sparge.patch(model, profile=profile)
    got = output(model, **one.inputs)
    assert 0 < float((got - want).square().sum() / want.square().sum()) < 0.02  # text is protected on top


def test_wrong_arguments() -> None:
    one = SMALL["wan"]
    model = one.built()
    with refused(TypeError, "dict", "forward"):
        sparge.tune(model, [one.inputs["hidden_states"]])
    with refused(ValueError, "loss", "model of diffusers"):
        sparge.tune(model, [one.inputs], loss=lambda item, attend: torch.zeros(()))
    before: dict[str, Any] = dict(vars(model))
    sparge.patch(model)
    with refused(ValueError, "already patched"):
        sparge.tune(model, [one.inputs])
    sparge.unpatch(model)
    assert vars(model).keys() == before.keys()
