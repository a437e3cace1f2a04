"""Models of transformers with attn_implementation="sparge": as with "sdpa" when nothing is skipped, in every set-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import small_models as small
import torch
from problems import EXACT, refused
from small_models import LENGTH, WINDOW, built, image_inputs, left_padding, output, tokens
from torch import Tensor

import sparge
from sparge.integrations.transformers import attention as module

transformers = small.transformers
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"),
    pytest.mark.usefixtures("one_thread"),
]
DECODERS = [small.llama, small.qwen2, small.qwen3, small.mistral, small.gemma2, small.gemma3]
FIRST, REST = slice(None, 90), slice(90, None)  # of a prefill in two chunks


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often sparge computed attention, and with which words."""
    counted: Counter[str] = Counter()

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        counted["all"] += 1
        for name in ("window", "is_causal", "attn_mask"):
            counted[name] += bool(arguments[name] is not None and arguments[name] is not False)
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(module, "attention", attention)
    return counted


def close(got: Tensor, want: Tensor, valid: Tensor | None = None) -> None:
    if valid is not None:
        got, want = got[valid.bool()], want[valid.bool()]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


# ---- exact when nothing is skipped


@pytest.mark.parametrize("build", DECODERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_prefill(build: Callable[..., Any], padded: bool, calls: Counter[str]) -> None:
    """Against sdpa, or eager attention where the model has nothing else (Gemma 2)."""
    model, padding = built(build), left_padding() if padded else None
    want = output(model, input_ids=tokens(), attention_mask=padding)
    sparge.patch(model, EXACT)
    close(output(model, input_ids=tokens(), attention_mask=padding), want, padding)
    windows = {"mistral": 2, "gemma2": 1, "gemma3": 1}.get(build.__name__, 0)
    assert calls == Counter({"all": 2, "is_causal": 2, "window": windows, "attn_mask": 2 * padded})


@pytest.mark.parametrize("build", DECODERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens(build: Callable[..., Any], cache: str, calls: Counter[str]) -> None:
    model = built(build)
    asked = {"attention_mask": left_padding(), "max_new_tokens": 50, "do_sample": False, "eos_token_id": None}
    want = model.generate(tokens(), **asked, cache_implementation=cache)
    sparge.patch(model, EXACT)
    assert torch.equal(model.generate(tokens(), **asked, cache_implementation=cache), want)
    assert calls["all"] == 2  # the prefill only


@pytest.mark.parametrize("build", [small.llama, small.mistral, small.gemma3], ids=lambda build: build.__name__)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_chunk_after_a_cached_prefix(
    build: Callable[..., Any], static: bool, padded: bool, calls: Counter[str]
) -> None:
    model, padding = built(build, "sdpa"), left_padding()

    def in_chunks() -> Tensor:
        room = {"max_cache_len": 256} if static else {}
        cache = (transformers.StaticCache if static else transformers.DynamicCache)(config=model.config, **room)
        parts = [
            output(
                model,
                input_ids=tokens()[:, part],
                attention_mask=padding[:, : part.stop] if padded else None,
                past_key_values=cache,
            )
            for part in (FIRST, REST)
        ]
        return torch.cat(parts, 1)

    want = in_chunks()
    sparge.patch(model, EXACT)
    close(in_chunks(), want, padding if padded else None)
    assert calls["all"] == 4


def test_chunked_prefill_of_generate(calls: Counter[str]) -> None:
    model = built(small.llama, "sdpa")
    asked = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    want = model.generate(tokens(), **asked)
    sparge.patch(model, EXACT)
    assert torch.equal(model.generate(tokens(), **asked, prefill_chunk_size=60), want)
    assert calls["all"] == 6


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_an_encoder_with_local_layers(padded: bool, calls: Counter[str]) -> None:
    model, padding = built(small.modernbert, "sdpa"), left_padding() if padded else None
    want = output(model, input_ids=tokens(), attention_mask=padding)
    sparge.patch(model, EXACT)
    close(output(model, input_ids=tokens(), attention_mask=padding), want, padding)
    assert calls == Counter({"all": 2, "window": 1, "is_causal": 0, "attn_mask": 2 * padded})


def test_an_image_encoder(calls: Counter[str]) -> None:
    model, pixels = built(small.vit, "sdpa"), torch.randn(2, 3, 48, 48)
    want = output(model, pixel_values=pixels)
    sparge.patch(model, EXACT)
    close(output(model, pixel_values=pixels), want)
    assert calls == Counter({"all": 2, "window": 0, "is_causal": 0, "attn_mask": 0})


def test_cross_attention(calls: Counter[str]) -> None:
    model, padding = built(small.bart, "sdpa"), left_padding()
    inputs = {"input_ids": tokens(), "attention_mask": padding, "decoder_input_ids": tokens(50, seed=1)}
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(output(model, **inputs), want)
    assert calls == Counter({"all": 3, "is_causal": 1, "attn_mask": 2, "window": 0})


def test_a_vision_language_model(calls: Counter[str]) -> None:
    model, inputs = built(small.qwen_vl, "sdpa"), image_inputs()
    want = output(model, **inputs)
    asked = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    words = model.generate(**inputs, **asked)
    sparge.patch(model, EXACT)
    close(output(model, **inputs), want)
    assert (calls["all"], calls["is_causal"]) == (
        6,
        2,
    )  # the first vision layer has four windows, one of them too small
    assert torch.equal(model.generate(**inputs, **asked), words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, calls: Counter[str]) -> None:
    model = built(small.llama, "sdpa").to(dtype)
    want = output(model, input_ids=tokens())
    sparge.patch(model, EXACT)
    torch.testing.assert_close(output(model, input_ids=tokens()), want, atol=0.01, rtol=0.05)
    assert calls["all"] == 2


# ---- sparse


def test_the_default_skips_and_sliding_windows_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model, configs = built(small.gemma3, "sparge"), []

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        configs.append(arguments["config"])
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(module, "attention", attention)
    output(model, input_ids=tokens())
    output(model, input_ids=tokens(WINDOW))  # the window does not bind
    default = sparge.SparseConfig()
    assert configs == [EXACT, default, default, default]


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
    ("build", "more", "words"),
    [
        (small.gemma2, {"softcap": 50.0}, ("Gemma2Attention", "soft-capped")),
        (small.gpt_oss, {}, ("GptOssAttention", "attention sinks")),
        (small.llama4, {}, ("Llama4TextAttention", "mask")),
        (small.llama, {"head_dim": 8}, ("LlamaAttention", "head_dim 8")),
    ],
)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_layers_that_sparge_cannot_compute(
    build: Any, more: Any, words: Any, padded: bool, calls: Counter[str]
) -> None:
    padding = left_padding() if padded else None
    inputs = {"input_ids": tokens(), "attention_mask": padding}
    model = built(build, "eager", **more)
    want, asked = output(model, **inputs), {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    generated = model.generate(**inputs, **asked)
    model.set_attn_implementation("sparge")
    close(said(model, *words, **inputs), want, padding)
    assert torch.equal(model.generate(**inputs, **asked), generated)
    assert not calls


def test_position_bias(calls: Counter[str]) -> None:
    model, inputs = built(small.t5, "sdpa"), {"input_ids": tokens(), "decoder_input_ids": tokens(50)}
    want = output(model, **inputs)
    model.set_attn_implementation("sparge")
    close(said(model, "T5Attention", "position bias", **inputs), want)
    assert not calls


@pytest.mark.parametrize("kind", ["boolean", "additive", "packed"])
def test_masks_of_ones_own(kind: str, calls: Counter[str]) -> None:
    model, inputs = built(small.llama, "sdpa"), {"input_ids": tokens()}
    if kind == "packed":
        inputs |= {"position_ids": (torch.arange(LENGTH) % 50)[None], "use_cache": False}
    else:
        seen = (torch.rand(2, 1, LENGTH, LENGTH) > 0.3).tril() | torch.eye(LENGTH, dtype=torch.bool)
        inputs["attention_mask"] = seen if kind == "boolean" else torch.where(seen, 0.0, -1e9)
    want = output(model, **inputs)
    sparge.patch(model, EXACT)
    close(said(model, "mask is more than", **inputs), want)
    assert not calls


def test_key_padding_as_a_four_dimensional_mask(calls: Counter[str]) -> None:
    layer = built(small.modernbert).model.layers[0].attn
    q, mask = torch.randn(2, 4, LENGTH, 16), left_padding().bool()[:, None, None, :]
    setattr(layer, module.SETTINGS, module.LayerSettings(EXACT))
    got, _ = module.sparge_attention(layer, q, q, q, mask)
    close(got.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, q, q, mask))
    assert (calls["all"], calls["attn_mask"], calls["is_causal"]) == (1, 1, 0)


def test_training_is_dense_and_has_gradients(calls: Counter[str]) -> None:
    model = built(small.llama, "sdpa")
    model(input_ids=tokens()).logits.square().mean().backward()
    want = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    sparge.patch(model, EXACT)
    with pytest.warns(sparge.DenseAttentionWarning, match="requires grad"):
        model(input_ids=tokens()).logits.square().mean().backward()
    close(model.model.layers[0].self_attn.q_proj.weight.grad, want)
    assert not calls


def test_dropout_is_dense(calls: Counter[str]) -> None:
    model = built(small.llama, "sdpa", attention_dropout=0.5).train()
    torch.manual_seed(1)
    want = output(model, input_ids=tokens())
    sparge.patch(model, EXACT)
    torch.manual_seed(1)
    with pytest.warns(sparge.DenseAttentionWarning, match="at random"):
        close(output(model, input_ids=tokens()), want)
    assert not calls


def test_a_dtype_that_sparge_lacks(calls: Counter[str]) -> None:
    model = built(small.llama, "sdpa")
    sparge.patch(model, EXACT)
    model.double()  # after the patch
    got = said(model, "float64", input_ids=tokens())
    sparge.unpatch(model)
    close(got, output(model, input_ids=tokens()))
    assert not calls


def test_attention_weights_are_the_models_own(calls: Counter[str]) -> None:
    layer = built(small.llama, "eager").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16)
    with pytest.warns(sparge.DenseAttentionWarning, match="weights were asked for"):
        _, weights = module.sparge_attention(layer, q, k, k, None, scaling=0.25, output_attentions=True)
    assert weights is not None
    assert weights.shape == (1, 4, 30, 30)
    assert torch.equal(weights, weights.tril())
    assert not calls


def test_keys_chosen_by_the_model_are_refused() -> None:
    layer = built(small.llama).model.layers[0].self_attn
    q = torch.randn(1, 2, 30, 16)
    with refused(ValueError, "LlamaAttention", "indices", "sdpa"):
        module.sparge_attention(layer, q, q, q, None, indices=torch.zeros(1, 30, 4))


def test_a_layer_without_eager_attention_is_refused() -> None:
    q = torch.randn(1, 2, 30, 16)
    with refused(ValueError, "Linear", "softcap"), pytest.warns(sparge.DenseAttentionWarning):
        module.sparge_attention(torch.nn.Linear(2, 2), q, q, q, None, softcap=30.0)
