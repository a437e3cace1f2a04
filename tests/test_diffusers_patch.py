"""sparge.patch for models and pipelines of diffusers: what it changes, for which layers and steps, and that it goes."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from problems import EXACT, refused
from small_diffusers import SMALL, Small, diffusers, output
from torch import Tensor

import sparge
from sparge.api import attention_and_mask
from sparge.integrations.diffusers import backend, families, masks, running
from sparge.integrations.diffusers.steps import Steps
from sparge.observe import observed
from sparge.profile import LayerProfile, Profile, ProfileError

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"),
    pytest.mark.usefixtures("one_thread"),
]
MODELS = pytest.mark.parametrize("one", SMALL.values(), ids=SMALL)
WAN, FLUX = SMALL["wan"], SMALL["flux"]
SPARSE = sparge.SparseConfig(rule="topk", topk=0.1, block=(64, 32), sinks=0, quantization="none")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[sparge.SparseConfig]:
    """The configs that sparge computed attention with, call by call."""
    seen: list[sparge.SparseConfig] = []

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        seen.append(arguments["config"])
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(backend, "attention", attention)
    return seen


def test_a_model_of_transformers_beside_one_of_diffusers_is_said_to_be_left_alone() -> None:
    import small_models

    both = torch.nn.ModuleDict({"text": small_models.built(small_models.llama), "video": WAN.built()})
    plan = sparge.patch(both, dry_run=True)
    assert {layer.action for layer in plan.layers if layer.name.startswith("video.")} == {"sparse", "left alone"}
    text = [layer for layer in plan.layers if layer.name.startswith("text.")]
    assert len(text) == 2
    assert all(layer.action == "left alone" and "patch it by itself" in layer.why for layer in text)
    with pytest.warns(sparge.DenseAttentionWarning, match="patch it by itself"):
        sparge.patch(both)
    assert both["text"].config._attn_implementation == "sdpa"
    sparge.unpatch(both)


def state(model: Any) -> dict[str, Any]:
    """The attributes of every module and processor by name, and its hooks."""
    kept: dict[str, Any] = {}
    for name, part in model.named_modules():
        hooks = {key: list(value) for key, value in vars(part).items() if "hooks" in key and value}
        kept[name] = sorted(vars(part)), hooks, dict(vars(getattr(part, "processor", part))).get("_attention_backend")
    return kept


def profile_of(*layers: str, heads: int = 2) -> Profile:
    layer = LayerProfile({"gap": tuple(3.0 + head for head in range(heads))}, (0.5,) * heads, (0.01,) * heads)
    return Profile("tiny", sparge.SparseConfig(rule="gap", quantization="none"), dict.fromkeys(layers, layer))


# ---- on and off


@MODELS
def test_unpatch_restores_exactly(one: Small) -> None:
    model = one.built()
    before, keys = state(model), model.state_dict().keys()
    with sparge.patch(model, SPARSE):
        output(model, **one.inputs)
        assert model.state_dict().keys() == keys
        assert state(model) != before
    assert state(model) == before


@pytest.mark.parametrize("where", ["embedding", "layer", "last"])
@MODELS
def test_nothing_is_left_after_an_error(one: Small, where: str) -> None:
    model = one.built()
    want, torchs_own = output(model, **one.inputs), torch.nn.functional.scaled_dot_product_attention
    family = families.FAMILIES[one.kind]
    layer = next(part for name, part in model.named_modules() if fnmatchcase(name, family.layers[0]))
    part = {"layer": layer.to_q, "embedding": model.get_submodule(family.embedding)}.get(where, model.norm_out)
    before = state(model)
    with sparge.patch(model, SPARSE):
        handle = part.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output(model, **one.inputs)
        handle.remove()
        assert running.current() is None
        assert torch.nn.functional.scaled_dot_product_attention is torchs_own
    assert state(model) == before
    assert torch.equal(output(model, **one.inputs), want)


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_copies_and_pickles_are_patched_on_their_own(name: str, configs: list[Any]) -> None:
    one = SMALL[name]
    model = one.built()
    want = output(model, **one.inputs)
    sparge.patch(model, SPARSE)
    sparse = output(model, **one.inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        configs.clear()
        assert torch.equal(output(twin, **one.inputs), sparse)
        assert len(configs) == one.calls
        sparge.unpatch(twin)
        assert torch.equal(output(twin, **one.inputs), want)
        assert torch.equal(output(model, **one.inputs), sparse)


def test_a_saved_model_does_not_ask_for_sparge(tmp_path: Any, configs: list[Any]) -> None:
    one = SMALL["sd3"]
    model = one.built()
    sparge.patch(model)
    model.save_pretrained(tmp_path)
    output(diffusers.SD3Transformer2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=False), **one.inputs)
    assert not configs
    assert "sparge" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("names", [("wan", "sd3"), ("wan", "wan"), ("sd3", "sd3")], ids="-".join)
def test_models_in_two_threads(names: tuple[str, str]) -> None:
    """Also the same model in both."""
    models = {name: SMALL[name].built() for name in names}
    before = {name: state(model) for name, model in models.items()}
    for model in models.values():
        sparge.patch(model, SPARSE)
    want = {name: output(model, **SMALL[name].inputs) for name, model in models.items()}
    got: list[tuple[str, Tensor]] = []

    def run(name: str) -> None:
        got.extend((name, output(models[name], **SMALL[name].inputs)) for _ in range(5))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 10
    assert all(torch.equal(one, want[name]) for name, one in got)
    for name, model in models.items():
        sparge.unpatch(model)
        assert state(model) == before[name]


def test_a_backend_that_the_user_chose_stays(configs: list[Any]) -> None:
    model = WAN.built()
    for block in model.blocks:
        block.attn1.processor._attention_backend = diffusers.models.attention_dispatch.AttentionBackendName._NATIVE_MATH
    before = state(model)
    with sparge.patch(model, SPARSE):
        output(model, **WAN.inputs)
        assert state(model)["blocks.0.attn1"][2] == "_native_math"
    assert state(model) == before
    assert len(configs) == 2


def test_other_processors_after_the_patch(configs: list[Any]) -> None:
    """Fused projections bring processors of their own."""
    one = SMALL["sd3"]
    model = one.built(dual_attention_layers=(), qk_norm=None)
    want = output(model, **one.inputs)
    sparge.patch(model, EXACT)
    model.fuse_qkv_projections()
    torch.testing.assert_close(output(model, **one.inputs), want, atol=2e-5, rtol=1e-4)
    assert len(configs) == 2


def test_a_model_inside_another_module(configs: list[Any]) -> None:
    model = torch.nn.ModuleDict({"net": WAN.built()})
    plan = sparge.patch(model, EXACT).plan
    assert plan.layers[0].name == "net.blocks.0.attn1"
    output(model["net"], **WAN.inputs)
    assert configs == [EXACT] * 2
    sparge.unpatch(model)
    output(model["net"], **WAN.inputs)
    assert configs == [EXACT] * 2


# ---- which layers


def test_the_plan() -> None:
    lines = str(sparge.patch(SMALL["hunyuan"].built(), dry_run=True)).splitlines()
    assert lines[0] == "HunyuanVideoTransformer3DModel: 2 of 3 attention layers sparse"
    assert [line.split()[:5] for line in lines[2:]] == [
        ["context_embedder.token_refiner.refiner_blocks.0.attn", "Attention", "2", "24", "left"],
        ["transformer_blocks.0.attn", "Attention", "2", "24", "sparse"],
        ["single_transformer_blocks.0.attn", "Attention", "2", "24", "sparse"],
    ]
    assert lines[2].endswith("its tokens are text")


def test_a_profile_gives_each_layer_its_config(configs: list[Any]) -> None:
    profile = profile_of("blocks.0.attn1", "blocks.1.attn1")
    model = WAN.built()
    sparge.patch(model, profile=profile)
    output(model, **WAN.inputs)
    assert configs == [profile.config_for(name) for name in profile.layers]


def test_layers_that_a_profile_does_not_name(configs: list[Any]) -> None:
    profile, model = profile_of("blocks.1.attn1"), WAN.built()
    with sparge.patch(model, EXACT, profile):
        output(model, **WAN.inputs)
    assert configs == [EXACT, profile.config_for("blocks.1.attn1")]
    with pytest.warns(sparge.DenseAttentionWarning, match="no config is given"), sparge.patch(model, profile=profile):
        output(model, **WAN.inputs)
    assert len(configs) == 3


def test_profiles_of_other_models_are_refused() -> None:
    with refused(ProfileError, "tiny", "WanTransformer3DModel", "'blocks.7.attn1'"):
        sparge.patch(WAN.built(), profile=profile_of("blocks.7.attn1"))
    with refused(ValueError, "gap has 3 values", "2 heads"):
        sparge.patch(WAN.built(), profile=profile_of("blocks.0.attn1", heads=3))


@pytest.mark.parametrize("chosen", [1, "blocks.0.*", ["blocks.0.attn1"], ("blocks.0.attn1", "blocks.0.attn2")])
def test_layers_kept_dense(chosen: Any, configs: list[Any]) -> None:
    model = WAN.built()
    patch = sparge.patch(model, SPARSE, dense_layers=chosen)
    assert [layer.action for layer in patch.plan.layers] == ["dense", "left alone", "sparse", "left alone"]
    output(model, **WAN.inputs)
    assert configs == [SPARSE]


def test_layers_that_can_not_be_kept_dense() -> None:
    model = WAN.built()
    with refused(ValueError, "dense_layers", "'blocks.9.*'"):
        sparge.patch(model, dense_layers="blocks.9.*")
    for wrong in (-1, True, 1.5, [3], None):
        with refused(TypeError, "dense_layers", repr(wrong)):
            sparge.patch(model, dense_layers=wrong)


@pytest.mark.parametrize(
    ("more", "why"),
    [({"attention_head_dim": 12}, "head_dim 12 is not from 16 to 256"), ({}, "torch.float64 is not float16")],
)
def test_layers_that_cannot_be_sparse(more: Any, why: str, configs: list[Any]) -> None:
    model = WAN.built(**more)
    model = model if more else model.double()
    dtype = torch.float32 if more else torch.float64
    inputs = {name: value.to(dtype) for name, value in WAN.inputs.items()}
    want = output(model, **inputs)
    with pytest.warns(sparge.DenseAttentionWarning, match=why):
        sparge.patch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sparge.DenseAttentionWarning)
        got = output(model, **inputs)
    torch.testing.assert_close(got, want)
    assert not configs


# ---- which steps


def test_steps_kept_dense(configs: list[Any]) -> None:
    model = WAN.built()
    plain = {time: output(model, **{**WAN.inputs, "timestep": torch.tensor([time] * 2)}) for time in (900.0, 500.0)}
    sparge.patch(model, SPARSE, dense_steps=2)
    for _ in range(2):  # runs
        for time, sparse in ((900.0, 0), (900.0, 0), (500.0, 0), (500.0, 0), (300.0, 2), (300.0, 2), (100.0, 2)):
            configs.clear()
            got = output(model, **{**WAN.inputs, "timestep": torch.tensor([time] * 2)})
            assert len(configs) == sparse
            if sparse == 0:
                torch.testing.assert_close(got, plain[time], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        ([9, 9, 5, 5, 1, 1], [0, 0, 1, 1, 2, 2]),
        ([9, 5, 1, 9, 5, 1], [0, 1, 2, 0, 1, 2]),
        ([9, 5, 1, 8, 4], [0, 1, 2, 0, 1]),  # a run that starts later than the first
        ([0, 3, 6, 0, 3], [0, 1, 2, 0, 1]),  # upwards, as Mochi counts
        ([9, 9, 9], [0, 0, 0]),
    ],
)
def test_steps_are_told_from_timesteps(times: list[int], steps: list[int]) -> None:
    counter, seen = Steps(dense=1), []
    for time in times:
        counter.begin(torch.tensor([time, time]))
        seen.append(counter.step)
        assert counter.is_dense == (counter.step == 0)
    assert seen == steps


def test_timesteps_are_not_read_for_nothing() -> None:
    counter = Steps(dense=0)
    counter.begin(None)
    assert not counter.is_dense


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[sparge.BlockMask | None]:
    """The masks that attention is computed with in place of new ones, call by call."""
    seen: list[sparge.BlockMask | None] = []

    def attention(mask: sparge.BlockMask | None, *tensors: Tensor, **arguments: Any) -> Any:
        output, chosen = attention_and_mask(mask, *tensors, **arguments)
        assert chosen is not None
        assert mask is None or torch.equal(chosen.bits, mask.bits)
        seen.append(mask)
        return output, chosen

    monkeypatch.setattr(masks, "attention_and_mask", attention)
    return seen


def at(model: Any, time: float, seed: int = 0) -> Tensor:
    noise = torch.randn(WAN.inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(seed))
    return output(model, **{**WAN.inputs, "hidden_states": noise, "timestep": torch.tensor([time] * 2)})


def test_masks_last_for_several_steps(given: list[Any]) -> None:
    """With guidance, whose two calls of a step have masks of their own; dense steps do not count; every run anew."""
    model = WAN.built()
    sparge.patch(model, SPARSE, dense_steps=1, mask_steps=2)
    for run in range(2):
        chosen: list[Any] = []
        for time, anew in ((900.0, None), (700.0, True), (500.0, False), (300.0, True), (100.0, False)):
            for guided in range(2):
                given.clear()
                at(model, time, seed=10 * run + guided)
                assert len(given) == (0 if anew is None else 2)  # layers
                assert all((mask is None) == anew for mask in given)
                chosen += [mask for mask in given if mask is not None]
        assert len(chosen) == 8
        assert not torch.equal(chosen[0].bits, chosen[2].bits)  # of the two calls
        assert not torch.equal(chosen[0].bits, chosen[1].bits)  # of the two layers


def test_a_layer_that_is_called_several_times_has_as_many_masks(given: list[Any]) -> None:
    """Mochi attends prompt by prompt."""
    one = SMALL["mochi"]
    model = one.built()
    sparge.patch(model, SPARSE, mask_steps=2)
    for time in (100.0, 300.0):
        given.clear()
        output(model, **{**one.inputs, "timestep": torch.tensor([time] * 2)})
        assert len(given) == 4  # two layers, two prompts
    used = [mask.bits for mask in given]
    assert all(not torch.equal(used[a], used[b]) for a in range(4) for b in range(a))


def test_a_kept_mask_is_not_the_one_that_would_be_chosen(given: list[Any]) -> None:
    """The first step is as without; what comes after it has the blocks of that, and other numbers."""
    model = WAN.built()
    with sparge.patch(model, SPARSE):
        first, second = at(model, 900.0, seed=0), at(model, 500.0, seed=1)
    with sparge.patch(model, SPARSE, mask_steps=3):
        assert torch.equal(at(model, 900.0, seed=0), first)
        got = at(model, 500.0, seed=1)
    assert not torch.equal(got, second)
    torch.testing.assert_close(got, second, atol=0.2, rtol=0.1)


def test_inputs_with_gradients_stay_dense_with_kept_masks(given: list[Any]) -> None:
    model = WAN.built()
    sparge.patch(model, SPARSE, mask_steps=2)
    with pytest.warns(sparge.DenseAttentionWarning, match="no backward pass"):
        model(**{**WAN.inputs, "hidden_states": WAN.inputs["hidden_states"].clone().requires_grad_()})
    assert given == []


def test_masks_of_another_size_are_not_used(given: list[Any]) -> None:
    model = WAN.built()
    sparge.patch(model, SPARSE, mask_steps=4)
    at(model, 900.0)
    given.clear()
    smaller = {**WAN.inputs, "hidden_states": WAN.inputs["hidden_states"][:, :, :, :-2]}
    output(model, **{**smaller, "timestep": torch.tensor([500.0] * 2)})
    assert given == [None, None]


def test_copies_of_a_model_begin_without_masks(given: list[Any]) -> None:
    model = WAN.built()
    sparge.patch(model, SPARSE, mask_steps=4)
    at(model, 900.0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        given.clear()
        at(copied, 500.0)
        assert given == [None, None]
    given.clear()
    at(model, 500.0)
    assert None not in given


@pytest.mark.parametrize("name", ["wan", "sd3"])  # through diffusers' dispatcher, and through torch's function
def test_ctrl_c_leaves_nothing_behind(name: str) -> None:
    one = SMALL[name]
    model = one.built()
    want = output(model, **one.inputs)

    def stop(run: Any) -> None:
        raise KeyboardInterrupt

    with sparge.patch(model, SPARSE):
        for _ in range(2):  # also when the patched model runs again
            with pytest.raises(KeyboardInterrupt), observed(stop):
                output(model, **one.inputs)
    assert running.current() is None
    with observed() as seen:
        assert torch.equal(output(model, **one.inputs), want)
    assert seen.calls == []


# ---- pipelines


def pipeline(**more: Any) -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae", "transformer_2"))
    return diffusers.WanPipeline(**{**parts, "scheduler": scheduler, "transformer": WAN.built(), **more})


def denoised(pipe: Any, steps: int = 4) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    prompts = {"prompt_embeds": torch.ones(1, 7, 16), "negative_prompt_embeds": torch.zeros(1, 7, 16)}
    return pipe(
        **prompts, height=96, width=160, num_frames=9, num_inference_steps=steps, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip


def test_a_whole_pipeline(configs: list[Any]) -> None:
    pipe = pipeline()
    want = denoised(pipe)
    with sparge.patch(pipe, EXACT) as patch:
        assert str(patch).startswith("WanPipeline: 2 of 4 attention layers sparse\n")
        torch.testing.assert_close(denoised(pipe), want, atol=1e-4, rtol=1e-3)
        assert len(configs) == 16  # two layers, four steps, with guidance
    configs.clear()
    sparge.patch(pipe, SPARSE, dense_steps=1)
    denoised(pipe)
    assert len(configs) == 12
    sparge.unpatch(pipe)
    with sparge.patch(pipe, EXACT, mask_steps=2):
        torch.testing.assert_close(denoised(pipe), want, atol=1e-4, rtol=1e-3)
    assert torch.equal(denoised(pipe), want)
    with refused(ValueError, "WanPipeline", "not patched"):
        sparge.unpatch(pipe)


def test_two_transformers_count_the_steps_of_one_run(configs: list[Any]) -> None:
    pipe = pipeline(transformer_2=WAN.built(), boundary_ratio=0.8)
    layers = sparge.patch(pipe, dry_run=True).layers
    assert [layer.name for layer in layers][::2] == [
        "transformer.blocks.0.attn1", "transformer.blocks.1.attn1", "transformer_2.blocks.0.attn1",
        "transformer_2.blocks.1.attn1",
    ]  # fmt: skip
    with sparge.patch(pipe, SPARSE, dense_layers="transformer_2.blocks.0.*"):
        denoised(pipe)
    calls_of_one_step = 2  # with guidance
    assert len(configs) == calls_of_one_step * (2 + 2 + 1 + 1)  # two steps by each
    configs.clear()
    with sparge.patch(pipe, SPARSE, dense_steps=3):
        denoised(pipe)
    assert len(configs) == calls_of_one_step * 2
    assert "sparge_patch" not in {*vars(pipe.transformer), *vars(pipe.transformer_2)}


# ---- models that sparge does not know


def test_other_models_of_diffusers_are_left_as_they_are() -> None:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=1, cross_attention_dim=32,
        sample_size=8, caption_channels=8,
    )  # fmt: skip
    before = state(model)
    with pytest.warns(sparge.DenseAttentionWarning, match="does not know where text and pictures stand"):
        sparge.patch(model)
    assert {layer.action for layer in sparge.patch(model, dry_run=True).layers} == {"left alone"}
    sparge.unpatch(model)
    assert state(model) == before


def test_a_pipeline_without_attention_is_left_as_it_is() -> None:
    pipe = pipeline(transformer=None)
    with pytest.warns(sparge.DenseAttentionWarning, match="no attention layer that sparge knows"):
        sparge.patch(pipe)


def test_wrong_arguments() -> None:
    model = WAN.built()
    for wrong in (-1, True, 0.5, None):
        with refused(ValueError, "dense_steps", repr(wrong)):
            sparge.patch(model, dense_steps=wrong)
    for wrong in (0, True, 1.5, None):
        with refused(ValueError, "mask_steps", repr(wrong)):
            sparge.patch(model, mask_steps=wrong)
    for name, count in (("dense_steps", 1), ("mask_steps", 2)):
        with refused(ValueError, name, "Sequential", "no model of diffusers"):
            sparge.patch(torch.nn.Sequential(), **{name: count})
    sparge.patch(model)
    with refused(ValueError, "already patched", "unpatch"):
        sparge.patch(model)
    with refused(ValueError, "already patched"):
        sparge.patch(torch.nn.Sequential(model))
