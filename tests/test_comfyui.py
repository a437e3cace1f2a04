"""The node for ComfyUI, against stand-ins for ComfyUI's attention function and model: ComfyUI itself is not run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge.integrations import comfyui

EXACT = {"gap": 50.0, "share": 0.0}
pytestmark = [pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[sparge.SparseConfig]:
    seen: list[sparge.SparseConfig] = []

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        seen.append(arguments["config"])
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(comfyui, "attention", attention)
    return seen


class Model:
    """What a node sees of ComfyUI's ModelPatcher."""

    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {"other": 1}}

    def clone(self) -> Model:
        return copy.deepcopy(self)


def comfy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """ComfyUI's attention function: with an override in transformer_options, that is called with this as `func`."""
    inside = kwargs.pop("_inside_attn_wrapper", False)
    override = kwargs.get("transformer_options", {}).get("optimized_attention_override")
    if override is not None and not inside:
        return override(
            comfy_attention, q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
            skip_output_reshape=skip_output_reshape, _inside_attn_wrapper=True, **kwargs,
        )  # fmt: skip
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for x in (q, k, v))
    gqa = kwargs.get("enable_gqa", False)
    out = scaled_dot_product_attention(q, k, v, mask, scale=kwargs.get("scale"), enable_gqa=gqa)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def patched(**settings: Any) -> dict[str, Any]:
    """The transformer_options of a model behind the node."""
    model = Model()
    given = {**EXACT, "text_before": 0, "text_after": 0, "dense_steps": 0, **settings}
    (changed,) = comfyui.SpargeAttention().apply(model, **given)
    assert model.model_options == {"transformer_options": {"other": 1}}
    return changed.model_options["transformer_options"]


def test_the_node_is_as_comfyui_wants_it() -> None:
    node = comfyui.NODE_CLASS_MAPPINGS["SpargeAttention"]
    assert comfyui.NODE_DISPLAY_NAME_MAPPINGS.keys() == comfyui.NODE_CLASS_MAPPINGS.keys()
    wanted = node.INPUT_TYPES()["required"]
    assert node.RETURN_TYPES == ("MODEL",)
    defaults = {name: kind[1]["default"] for name, kind in wanted.items() if name != "model"}
    (changed,) = getattr(node(), node.FUNCTION)(model=Model(), **defaults)
    override = changed.model_options["transformer_options"]["optimized_attention_override"]
    assert override.config == sparge.SparseConfig()
    assert changed.model_options["transformer_options"]["other"] == 1


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_exact_when_nothing_is_skipped(
    skip_reshape: bool, skip_output_reshape: bool, kv_heads: int, calls: list[Any]
) -> None:
    q, k, v = (torch.randn(2, heads, 200, 32) for heads in (4, kv_heads, kv_heads))
    if not skip_reshape:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    how = {
        "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, "scale": 0.2,
        "enable_gqa": kv_heads == 2, "low_precision_attention": False,
    }  # fmt: skip
    want = comfy_attention(q, k, v, 4, **how)
    got = comfy_attention(q, k, v, 4, **how, transformer_options=patched())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert [config.quantization for config in calls] == ["none"]


def test_text_is_protected(calls: list[Any]) -> None:
    q = torch.randn(1, 2, 200, 32)
    comfy_attention(q, q, q, 2, skip_reshape=True, transformer_options=patched(text_before=30, text_after=5))
    assert calls[0].protected == ((0, 30), (-5, None))


def test_dense_steps(calls: list[Any]) -> None:
    q, schedule = torch.randn(1, 2, 200, 32), torch.tensor([1.0, 0.7, 0.4, 0.0])
    options = patched(dense_steps=2)
    for sigma, sparse in ((1.0, 0), (0.7, 0), (0.4, 1)):
        calls.clear()
        now = {**options, "sigmas": torch.tensor([sigma, sigma]), "sample_sigmas": schedule}
        comfy_attention(q, q, q, 2, skip_reshape=True, transformer_options=now)
        assert len(calls) == sparse


def test_calls_that_are_dense_as_meant(calls: list[Any]) -> None:
    q, k = torch.randn(1, 2, 200, 32), torch.randn(1, 2, 77, 32)
    want = comfy_attention(q, k, k, 2, skip_reshape=True)
    assert torch.equal(comfy_attention(q, k, k, 2, skip_reshape=True, transformer_options=patched()), want)
    assert not calls


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"mask": torch.zeros(200, 200)}, "mask"),
        ({"attn_precision": torch.float64}, "float64"),
        ({"softcap": 3.0}, "argument softcap"),
        ({"dtype": torch.float64}, "float64"),
        ({"dense_steps": 1}, "which step"),
    ],
)
def test_what_sparge_cannot_compute_goes_back_to_comfyui(more: Any, why: str, calls: list[Any]) -> None:
    more = dict(more)
    q = torch.randn(1, 2, 200, 32, dtype=more.pop("dtype", torch.float32))
    options = patched(dense_steps=more.pop("dense_steps", 0))
    want = comfy_attention(q, q, q, 2, skip_reshape=True, **more)
    with pytest.warns(sparge.DenseAttentionWarning, match=why):
        got = comfy_attention(q, q, q, 2, skip_reshape=True, **more, transformer_options=options)
    assert torch.equal(got, want)
    assert not calls
