"""sparge.patch and unpatch: what they change, that it holds for copies and compiled models, and that it goes away."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import small_models as small
import torch
from problems import EXACT, refused
from small_models import built, image_inputs, left_padding, output, tokens
from torch import Tensor

import sparge
from sparge.integrations.transformers import attention as module
from sparge.integrations.transformers import registration
from sparge.profile import LayerProfile, Profile, ProfileError

transformers = small.transformers
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"),
    pytest.mark.usefixtures("one_thread"),
]
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
SPARSE = sparge.SparseConfig(rule="topk", topk=0.2, block=(64, 32), sinks=0, quantization="none")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[sparge.SparseConfig]:
    """The configs that sparge computed attention with, call by call."""
    seen: list[sparge.SparseConfig] = []

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        seen.append(arguments["config"])
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(module, "attention", attention)
    return seen


def state(model: Any) -> dict[str, Any]:
    """The attributes of every module by name, and all that its config says."""
    names: dict[str, Any] = {name: sorted(vars(part)) for name, part in model.named_modules()}
    configs = [part.config for part in model.modules() if hasattr(part, "config")]
    return names | {f"config {n}": copy.deepcopy(vars(config)) for n, config in enumerate(configs)}


def profile_of(*layers: str, heads: int = 4) -> Profile:
    layer = LayerProfile({"gap": tuple(3.0 + head for head in range(heads))}, (0.5,) * heads, (0.01,) * heads)
    return Profile("tiny", sparge.SparseConfig(rule="gap"), dict.fromkeys(layers, layer))


# ---- on and off


@pytest.mark.parametrize("build", [small.llama, small.gemma3, small.qwen_vl], ids=lambda build: build.__name__)
def test_unpatch_restores_exactly(build: Any) -> None:
    model = built(build)
    if build is small.qwen_vl:  # parts may differ, and must differ again
        model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    inputs = image_inputs() if build is small.qwen_vl else {"input_ids": tokens()}
    before, want = state(model), output(model, **inputs)
    sparge.patch(model, SPARSE)
    assert not torch.equal(output(model, **inputs), want)
    assert model.state_dict().keys() == built(build).state_dict().keys()
    sparge.unpatch(model)
    assert state(model) == before
    assert torch.equal(output(model, **inputs), want)


def test_as_a_context_manager(configs: list[Any]) -> None:
    model = built(small.llama, "eager")
    with sparge.patch(model, EXACT) as patch:
        assert model.config._attn_implementation == "sparge"
        assert "2 of 2 attention layers sparse" in str(patch)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(KeyError), sparge.patch(model):
        raise KeyError
    assert model.config._attn_implementation == "eager"
    with sparge.patch(model):
        sparge.unpatch(model)
    output(model, input_ids=tokens())
    assert not configs


def test_a_patch_that_was_taken_away_is_not_entered_again() -> None:
    model = built(small.llama)
    patch = sparge.patch(model)
    with patch:
        pass
    with refused(ValueError, "was taken away", "sparge.patch again"), patch:
        pass


def test_models_that_share_a_config(configs: list[Any]) -> None:
    first = built(small.llama)
    second = type(first)(first.config).eval()
    want = output(second, input_ids=tokens())
    sparge.patch(first, SPARSE)
    assert torch.equal(output(second, input_ids=tokens()), want)  # it was not patched
    assert not configs
    sparge.patch(second, EXACT)
    sparge.unpatch(first)
    output(second, input_ids=tokens())
    assert configs == [EXACT] * 2
    sparge.unpatch(second)
    assert first.config._attn_implementation == "sdpa"
    assert torch.equal(output(second, input_ids=tokens()), want)


def test_models_that_support_no_other_attention_are_left_alone() -> None:
    """Their layers do not say whether they are causal, which masks for others take for granted."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.SplinterConfig(**sizes, num_attention_heads=4)
    model, ids = transformers.SplinterModel(config).eval(), tokens() % 60 + 3
    want = output(model, input_ids=ids)
    plan = sparge.patch(model, EXACT, dry_run=True)
    assert {layer.action for layer in plan.layers} == {"left alone"}
    with pytest.warns(sparge.DenseAttentionWarning, match="supports no other attention"):
        sparge.patch(model, EXACT)
    assert torch.equal(output(model, input_ids=ids), want)
    sparge.unpatch(model)
    model.set_attn_implementation("sparge")
    with refused(ValueError, "SplinterConfig", "supports no other attention"):
        output(model, input_ids=ids)


def test_a_part_of_a_model_is_refused_in_a_dry_run_too() -> None:
    layer = built(small.llama).model.layers[0]
    for dry_run in (True, False):
        with refused(TypeError, "pass the whole model"):
            sparge.patch(layer, dry_run=dry_run)


def test_copies_and_pickles_are_patched_on_their_own(configs: list[Any]) -> None:
    model = built(small.llama)
    sparge.patch(model, EXACT)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        configs.clear()
        want = output(model, input_ids=tokens())
        assert torch.equal(output(twin, input_ids=tokens()), want)
        assert configs == [EXACT] * 4
        sparge.unpatch(twin)
        assert twin.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "sparge"
    sparge.unpatch(model)


def test_a_saved_model_does_not_ask_for_sparge(tmp_path: Any) -> None:
    model = built(small.llama)
    sparge.patch(model)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert "sparge" not in (tmp_path / "config.json").read_text()


def test_a_compiled_model() -> None:
    model, padding = built(small.llama), left_padding()
    want, want_padded = output(model, input_ids=tokens()), output(model, input_ids=tokens(), attention_mask=padding)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(output(compiled, input_ids=tokens()), want)
    sparge.patch(compiled, SPARSE)
    got = output(compiled, input_ids=tokens())
    assert torch.equal(got, output(model, input_ids=tokens()))
    assert not torch.allclose(got, want)
    with pytest.warns(sparge.DenseAttentionWarning, match=r"torch\.compile cannot look into its mask"):
        got = output(compiled, input_ids=tokens(), attention_mask=padding)
    torch.testing.assert_close(got[padding.bool()], want_padded[padding.bool()], atol=1e-5, rtol=1e-4)
    sparge.unpatch(compiled)
    torch.testing.assert_close(output(compiled, input_ids=tokens()), want, atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


# ---- profiles


def test_a_profile_gives_each_layer_its_config(configs: list[Any]) -> None:
    model = built(small.llama)
    profile = profile_of(*LAYERS)
    sparge.patch(model, profile=profile)
    output(model, input_ids=tokens())
    assert configs == [profile.config_for(name) for name in LAYERS]


def test_layers_that_a_profile_does_not_name(configs: list[Any]) -> None:
    model, profile = built(small.gemma3), profile_of(LAYERS[0])  # a sliding layer: tuned, so the profile holds
    with sparge.patch(model, EXACT, profile):
        output(model, input_ids=tokens())
    assert configs == [profile.config_for(LAYERS[0]), EXACT]
    configs.clear()
    with pytest.warns(sparge.DenseAttentionWarning, match="no config is given"):
        patch = sparge.patch(model, profile=profile)
    assert [layer.action for layer in patch.plan.layers] == ["sparse", "dense"]
    output(model, input_ids=tokens())
    assert configs == [profile.config_for(LAYERS[0])]


def test_a_profile_tuned_on_the_model_fits_it(configs: list[Any]) -> None:
    model = built(small.llama)
    profile = sparge.tune(model, [tokens()], l1=0.05)
    sparge.patch(model, profile=profile)
    output(model, input_ids=tokens())
    assert configs == [profile.config_for(name) for name in LAYERS]


@pytest.mark.parametrize("chosen", [1, "model.layers.0.*"])
def test_layers_kept_dense(chosen: Any, configs: list[Any]) -> None:
    model = built(small.llama)
    with sparge.patch(model, EXACT, dense_layers=chosen) as patch:
        assert [layer.action for layer in patch.plan.layers] == ["dense", "sparse"]
        output(model, input_ids=tokens())
    assert configs == [EXACT]


def test_profiles_of_other_models_are_refused() -> None:
    with refused(ProfileError, "tiny", "LlamaForCausalLM", "'layers.7'"):
        sparge.patch(built(small.llama), profile=profile_of(*LAYERS, "layers.7"))
    with refused(ValueError, "gap has 3 values", "4 heads"):
        sparge.patch(built(small.llama), profile=profile_of(*LAYERS, heads=3))


# ---- dry run


def test_a_dry_run_changes_nothing_and_tells_what_would_happen() -> None:
    model = built(small.gemma3)
    before = state(model)
    plan = sparge.patch(model, dry_run=True)
    assert state(model) == before
    lines = str(plan).splitlines()
    assert lines[0] == "Gemma3ForCausalLM: 2 of 2 attention layers sparse"
    assert lines[1].split() == ["layer", "class", "heads", "head_dim", "action", "why"]
    assert lines[2].split()[:5] == [LAYERS[0], "Gemma3Attention", "4", "16", "sparse"]
    assert "window of 40" in lines[2]
    assert lines[3].endswith("sparse  rule gap or probe")


@pytest.mark.parametrize(
    ("build", "more", "action", "why"),
    [
        (small.gemma2, {"softcap": 50.0}, "dense", "soft-capped at 50"),
        (small.gpt_oss, {}, "dense", "sinks"),
        (small.t5, {}, "dense", "position bias"),
        (small.llama, {"head_dim": 8}, "dense", "head_dim 8 is not from 16 to 256"),
        (small.falcon, {}, "left alone", "computes attention itself"),
        (small.bloom, {}, "left alone", "computes attention itself"),
        (small.deepseek, {}, "left alone", "chooses its keys itself"),
    ],
)
def test_layers_that_cannot_be_sparse(build: Any, more: Any, action: str, why: str, configs: list[Any]) -> None:
    model = built(build, **more)
    inputs = {"input_ids": tokens()} | ({"decoder_input_ids": tokens(50)} if build is small.t5 else {})
    want = output(model, **inputs)
    layers = sparge.patch(model, dry_run=True).layers
    assert layers
    assert all(layer.action == action and why in layer.why for layer in layers)
    with pytest.warns(sparge.DenseAttentionWarning, match="will not be sparse"):
        patch = sparge.patch(model)
    got = output(model, **inputs)  # which says nothing more
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert not configs
    patch.__exit__()
    assert torch.equal(output(model, **inputs), want)


def test_a_dtype_is_told_beforehand() -> None:
    plan = sparge.patch(built(small.llama).double(), dry_run=True)
    assert [layer.why for layer in plan.layers] == ["torch.float64 is not float16, bfloat16 or float32"] * 2


# ---- bad input


@pytest.mark.parametrize("build", [small.mamba, lambda: torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_a_model_without_attention_is_left_as_it_is(build: Any) -> None:
    model = build()
    before = dict(vars(model))
    with pytest.warns(sparge.DenseAttentionWarning, match="no attention layer that sparge knows"):
        sparge.patch(model)
    sparge.unpatch(model)
    assert vars(model) == before


def test_a_model_inside_another_module(configs: list[Any]) -> None:
    model = torch.nn.Sequential(built(small.llama))
    with torch.no_grad(), sparge.patch(model, EXACT):
        model(tokens())
    assert configs == [EXACT] * 2
    assert model[0].config._attn_implementation == "sdpa"


def test_wrong_arguments() -> None:
    model = built(small.llama)
    with refused(TypeError, "model of transformers", "str"):
        sparge.patch("llama")
    with refused(TypeError, "config", "SparseConfig", "dict"):
        sparge.patch(model, {"gap": 3})
    with refused(TypeError, "profile", "Profile", "str"):
        sparge.patch(model, profile="profile.safetensors")
    with refused(TypeError, "dry_run", "'yes'"):
        sparge.patch(model, dry_run="yes")
    with refused(ValueError, "LlamaForCausalLM", "not patched"):
        sparge.unpatch(model)
    with refused(TypeError, "model of transformers", "NoneType"):
        sparge.unpatch(None)
    with refused(TypeError, "LlamaDecoderLayer", "whole model"):
        sparge.patch(model.model.layers[0])
    sparge.patch(model)
    with refused(ValueError, "already patched", "unpatch"):
        sparge.patch(model)
    with refused(ValueError, "already patched"):
        sparge.patch(model.model)


# ---- the name


def test_the_name_is_known_whichever_is_imported_first() -> None:
    code = (
        "import sys, sparge; home = 'transformers.modeling_utils';"
        "finders = [f for f in sys.meta_path if getattr(f, 'home', '') == home];"
        "assert finders and 'transformers' not in sys.modules; from transformers import AutoModel, LlamaConfig;"
        "sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1);"
        "model = AutoModel.from_config(LlamaConfig(**sizes), attn_implementation='sparge');"
        "assert model.config._attn_implementation == 'sparge' and finders[0] not in sys.meta_path"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    functions = transformers.AttentionInterface._global_mapping
    functions.pop("sparge", None)
    registration.register_with_transformers()  # as `import sparge` does after `import transformers`
    assert functions["sparge"] is module.sparge_attention


def test_models_made_with_the_name_use_the_default(configs: list[Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(small.llama().config, attn_implementation="sparge")
    output(model.eval(), input_ids=tokens())
    model.set_attn_implementation("sdpa")
    output(model, input_ids=tokens())
    assert configs == [sparge.SparseConfig()] * 2


def test_the_name_is_refused_by_models_that_would_not_follow_it() -> None:
    config = small.bloom().config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sparge")
    with refused(ValueError, "BloomConfig", "computes attention itself"):
        output(model, input_ids=tokens())


def test_registering_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(ImportError, "transformers from 5.0 on"):
        sparge.register()


# ---- real weights


@pytest.mark.model
def test_smollm2_generates_the_same_tokens_and_reads_as_well() -> None:
    pytest.importorskip("gguf")
    from sparge.demo import make_document
    from sparge.evaluate.models import load_smollm2

    model, tokenizer = load_smollm2()
    document = make_document(tokenizer, 512)
    question, answer = document.ids.split([512 - document.answer_tokens, document.answer_tokens], 1)
    asked = {"max_new_tokens": document.answer_tokens, "do_sample": False}
    want, logits = model.generate(question, **asked), output(model, input_ids=document.ids)
    with sparge.patch(model, EXACT):
        assert torch.equal(model.generate(question, **asked), want)
    with sparge.patch(model, sparge.SparseConfig(quantization="none")):  # "auto" finds 512 tokens too short
        sparse = output(model, input_ids=document.ids)
    assert torch.equal(sparse[:, -1 - document.answer_tokens : -1].argmax(-1), answer)
    assert (sparse.argmax(-1) == logits.argmax(-1)).float().mean() > 0.95
    assert not torch.equal(sparse, logits)
