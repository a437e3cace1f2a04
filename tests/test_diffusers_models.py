"""Every model of diffusers that sparge knows: as before when nothing is skipped, text kept, pictures in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import EXACT
from small_diffusers import SMALL, TEXT, Small, ids, output
from torch import Tensor

import sparge
from sparge.integrations.diffusers import backend, families
from sparge.integrations.diffusers.order import Layout

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"),
    pytest.mark.usefixtures("one_thread"),
]
MODELS = pytest.mark.parametrize("one", SMALL.values(), ids=SMALL)
SPARSE = sparge.SparseConfig(rule="topk", topk=0.1, block=(64, 32), sinks=0, quantization="none")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that sparge computed attention with, Q, K and V heads first."""
    seen: list[dict[str, Any]] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **arguments: Any) -> Any:
        swap = arguments["layout"] == "BSHD"
        tensors = [x.transpose(1, 2) if swap else x for x in (query, key, value)]
        seen.append({**arguments, "tensors": tensors, "mask": mask})
        return sparge.attention(query, key, value, mask, **arguments)

    monkeypatch.setattr(backend, "attention", attention)
    return seen


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are put in order in each layer, as where they cannot be for all layers at once."""
    from sparge.integrations.diffusers import hooks

    monkeypatch.setattr(hooks, "why_not_once", lambda *_: "a test")


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


# ---- exact when nothing is skipped


@MODELS
def test_exact_when_nothing_is_skipped(one: Small, calls: list[Any]) -> None:
    model = one.built()
    want = output(model, **one.inputs)
    sparge.patch(model, EXACT)
    close(output(model, **one.inputs), want)
    assert len(calls) == one.calls
    sparge.unpatch(model)
    assert torch.equal(output(model, **one.inputs), want)


@MODELS
@pytest.mark.usefixtures("one_by_one")
def test_exact_with_the_order_made_in_each_layer(one: Small, calls: list[Any]) -> None:
    model = one.built()
    want = output(model, **one.inputs)
    sparge.patch(model, EXACT)
    close(output(model, **one.inputs), want)
    assert len(calls) == one.calls


@MODELS
def test_the_order_costs_one_permutation_per_forward(one: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(
        Layout, "restore", lambda self, x, dim, restore=Layout.restore: counted.append(1) or restore(self, x, dim)
    )
    model = one.built(**({"num_layers": 3} if "num_layers" in one.config else {}))
    sparge.patch(model, EXACT)
    output(model, **one.inputs)
    assert len(counted) == 1


# ---- what sparge is given


@MODELS
def test_both_ways_to_make_the_order_give_the_same_sparse_result(one: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparge.integrations.diffusers import hooks

    model = one.built()
    sparge.patch(model, SPARSE)
    at_once = output(model, **one.inputs)
    monkeypatch.setattr(hooks, "why_not_once", lambda *_: "a test")
    close(output(model, **one.inputs), at_once)
    sparge.unpatch(model)
    assert not torch.allclose(output(model, **one.inputs), at_once, atol=1e-3)


@MODELS
def test_visual_tokens_come_in_hilbert_order(one: Small, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's values: a permutation of those in raster order, and this one."""
    from sparge.integrations.diffusers import order

    model = one.built()
    sparge.patch(model, EXACT)
    output(model, **one.inputs)
    in_order = calls[0]["tensors"]
    with monkeypatch.context() as patched:
        patched.setattr(order, "token_order", lambda grid, name: sparge.token_order(grid, "row"))
        order._order.cache_clear()
        calls.clear()
        output(model, **one.inputs)
    order._order.cache_clear()
    first = families.FAMILIES[one.kind].text_first
    words = in_order[0].shape[2] - one_visual(one)
    places = {"text_before": words} if first else {"text_after": words}
    hilbert = sparge.token_order(one.grid, "hilbert", **places)
    for got, raster in zip(in_order, calls[0]["tensors"], strict=True):
        close(got, hilbert.apply(raster))
        assert not torch.allclose(got, raster, atol=1e-3)


def one_visual(one: Small) -> int:
    return one.grid[0] * one.grid[1] * one.grid[2]


@MODELS
def test_text_is_protected_and_nothing_else(one: Small, calls: list[Any]) -> None:
    model = one.built()
    sparge.patch(model, SPARSE)
    output(model, **one.inputs)
    for call in calls:
        length = call["tensors"][0].shape[2]
        words = length - one_visual(one)
        where = (0, words) if families.FAMILIES[one.kind].text_first else (length - words, length)
        assert call["config"].protected == ((where,) if words else ())
    joint = [call["tensors"][0].shape[2] - one_visual(one) for call in calls]
    assert max(joint) == one.text


def test_hunyuans_padding_is_honoured(calls: list[Any]) -> None:
    one = SMALL["hunyuan"]
    model = one.built()
    sparge.patch(model, EXACT)
    output(model, **one.inputs)
    valid = calls[0]["mask"][1, 0, 0]
    assert valid.tolist() == [True] * (one_visual(one) + 4) + [False] * (TEXT - 4)


# ---- calls that need care


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("flux", {"controlnet_block_samples": [torch.randn(2, 180, 48)]}),
        ("flux", {"joint_attention_kwargs": {"attention_mask": torch.rand(2, 1, 1, 187) > 0.3}}),
        ("sd3", {"block_controlnet_hidden_states": [torch.randn(2, 180, 48)]}),
        ("wan", {"timestep": torch.rand(2, 180) * 1000}),
        ("ltx", {"timestep": torch.rand(2, 180, 1) * 1000}),
    ],
)
def test_what_goes_by_place_is_honoured(name: str, more: dict[str, Any], calls: list[Any]) -> None:
    """It comes in raster order, so tokens have to be in raster order between the layers."""
    one = SMALL[name]
    model, inputs = one.built(), {**one.inputs, **more}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(output(model, **inputs), want)
    assert len(calls) == one.calls


def test_the_first_frame_of_hunyuan_token_replace(calls: list[Any]) -> None:
    one = SMALL["hunyuan"]
    model = one.built(image_condition_type="token_replace")
    want = output(model, **one.inputs)
    sparge.patch(model, EXACT)
    close(output(model, **one.inputs), want)
    assert len(calls) == one.calls


def test_several_pictures_in_one_sequence(calls: list[Any]) -> None:
    one = SMALL["flux"]
    model, inputs = one.built(), {**one.inputs, "img_ids": ids((10, 9), (6, 15))}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(output(model, **inputs), want)
    assert len(calls) == one.calls


def test_cogvideox_15_has_patches_over_frames(calls: list[Any]) -> None:
    one = SMALL["cogvideox"]
    model = one.built(patch_size_t=2)
    inputs = {**one.inputs, "hidden_states": torch.randn(2, 6, 4, 12, 20)}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(output(model, **inputs), want)
    assert len(calls) == one.calls


def test_positional_arguments() -> None:
    one = SMALL["cogvideox"]
    model, given = one.built(), one.inputs
    rest = (given["encoder_hidden_states"], given["timestep"], None, None, given["image_rotary_emb"])
    want = output(model, **given)
    sparge.patch(model, EXACT)
    with torch.no_grad():
        close(model(given["hidden_states"], *rest).sample, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, calls: list[Any]) -> None:
    one = SMALL["wan"]
    model = one.built().to(dtype)
    inputs = {name: value.to(dtype) for name, value in one.inputs.items()}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    torch.testing.assert_close(output(model, **inputs), want, atol=0.03, rtol=0.05)
    assert len(calls) == one.calls


@MODELS
def test_inference_mode_and_gradients_after_it(one: Small, calls: list[Any]) -> None:
    model = one.built()
    want = output(model, **one.inputs)
    sparge.patch(model, EXACT)
    with torch.inference_mode():
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in one.inputs.items()}
        for _ in range(2):
            close(model(**inputs, return_dict=False)[0], want)
    assert len(calls) == 2 * one.calls
    with pytest.warns(sparge.DenseAttentionWarning, match="requires grad"):
        model(**one.inputs, return_dict=False)[0].sum().backward()


def test_position_ids_that_are_changed_in_place(calls: list[Any]) -> None:
    one = SMALL["flux"]
    model, places = one.built(), ids((18, 10))
    sparge.patch(model, EXACT)
    output(model, **{**one.inputs, "img_ids": places})
    places.copy_(ids((9, 20)))
    output(model, **{**one.inputs, "img_ids": places})
    assert families._grids_of_ids[places][1] == ((1, 9, 20),)


# ---- dense, and why


def said(model: Any, *words: str, **inputs: Any) -> Tensor:
    """The output; it must come with one warning, the first time only."""
    with pytest.warns(sparge.DenseAttentionWarning) as caught:
        got = output(model, **inputs)
    ours = [str(one.message) for one in caught if one.category is sparge.DenseAttentionWarning]
    assert len(ours) == 1
    assert all(word in ours[0] for word in words), ours
    close(output(model, **inputs), got)
    return got


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("flux", {"img_ids": ids((18, 10)).flip(0)}, ("FluxAttention", "img_ids", "row by row")),
        ("flux", {"joint_attention_kwargs": {"attention_mask": torch.randn(2, 1, 1, 187)}}, ("attn_mask", "float32")),
        ("ltx", {"num_frames": None, "video_coords": torch.rand(2, 3, 180) * 5}, ("LTXAttention", "num_frames")),
        ("ltx", {"num_frames": 2, "video_coords": torch.rand(2, 3, 180) * 5}, ("180 visual tokens", "2 x 6 x 10")),
    ],
)
def test_calls_that_sparge_cannot_compute(name: str, more: Any, words: Any, calls: list[Any]) -> None:
    one = SMALL[name]
    model, inputs = one.built(), {**one.inputs, **more}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(said(model, *words, **inputs), want)
    assert not calls


def test_a_dtype_that_sparge_lacks(calls: list[Any]) -> None:
    one = SMALL["sd3"]
    model = one.built()
    sparge.patch(model, EXACT)
    model.double()  # after the patch
    inputs = {name: value.double() for name, value in one.inputs.items()}
    got = said(model, "float64", **inputs)
    sparge.unpatch(model)
    close(got, output(model, **inputs))
    assert not calls


@pytest.mark.parametrize("name", ["flux", "mochi"])
def test_training_is_dense_and_has_gradients(name: str, calls: list[Any]) -> None:
    one = SMALL[name]
    model = one.built()
    weight = next(model.parameters())

    def gradient() -> Tensor:
        model.zero_grad()
        model(**one.inputs).sample.square().mean().backward()
        return weight.grad.clone()

    want = gradient()
    sparge.patch(model, EXACT)
    with pytest.warns(sparge.DenseAttentionWarning, match="requires grad"):
        close(gradient(), want)
    assert not calls


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_layer_outside_its_model_is_dense(name: str, calls: list[Any]) -> None:
    layer = SMALL[name].built()
    block = layer.transformer_blocks[0].attn
    x, words = torch.randn(1, 180, 48), torch.randn(1, TEXT, 48)
    with torch.no_grad():
        want = block(hidden_states=x, encoder_hidden_states=words)[0]
        sparge.patch(layer, EXACT)
        with pytest.warns(sparge.DenseAttentionWarning, match="outside its model"):
            close(block(hidden_states=x, encoder_hidden_states=words)[0], want)
    assert not calls


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_compiled_code_is_dense(name: str, part: str, calls: list[Any]) -> None:
    one = SMALL[name]
    model = one.built(num_layers=1)
    want = output(model, **one.inputs)
    sparge.patch(model, SPARSE)
    if part == "model":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        compiled = model
        (model.blocks if name == "wan" else model.transformer_blocks)[0].compile(backend="eager", fullgraph=True)
    with pytest.warns(sparge.DenseAttentionWarning, match=r"torch\.compile does not see"):
        close(output(compiled, **one.inputs), want)
    assert not calls
    sparge.unpatch(compiled)
    close(output(compiled, **one.inputs), want)
    torch.compiler.reset()
