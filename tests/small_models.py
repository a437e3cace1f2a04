"""Models of transformers built from small configs with random weights, and inputs for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

LENGTH, PADDED = 150, 70  # tokens, and how many of the first sequence's are padding on the left
WINDOW = 40
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
IMAGE, IMAGE_TOKENS = 60, 64


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma2(softcap: float | None = None) -> Any:
    config = transformers.Gemma2Config(**SIZES, **MIXED, attn_logit_softcapping=softcap)
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **MIXED))


def gpt_oss() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **MIXED, **experts, rope_parameters=rope))


def llama4() -> Any:
    chunks = {"attention_chunk_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SIZES, **chunks))


def deepseek() -> Any:
    """Version 3.2, which chooses the keys of each row itself."""
    heads = {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    }  # fmt: skip
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    sizes.pop("head_dim")
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes, **heads))


def falcon() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2))


def bloom() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


def mamba() -> Any:
    return transformers.MambaModel(transformers.MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1))


def modernbert() -> Any:
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "pad_token_id")
    sizes = {name: SIZES[name] for name in kept}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**sizes, **ends, num_hidden_layers=2, local_attention=2 * WINDOW)
    return transformers.ModernBertForMaskedLM(config)


def bart() -> Any:
    sizes = {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **heads))


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def vit() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=48, patch_size=4))


def qwen_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64, "patch_size": 4,
        "window_size": 48, "fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    text = {**SIZES, "rope_parameters": rope}
    text.pop("head_dim")
    tokens = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def built(build: Callable[..., Any], implementation: str | None = None, **more: Any) -> Any:
    """The model, ready for inference, always with the same weights."""
    torch.manual_seed(0)
    model = build(**more).eval()
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(seed))


def left_padding(length: int = LENGTH) -> Tensor:
    padding = torch.ones(2, length, dtype=torch.long)
    padding[0, :PADDED] = 0
    return padding


def image_inputs() -> dict[str, Tensor]:
    """One image of 16 x 16 patches among the tokens."""
    ids = tokens()[:1]
    ids[0, 20] = 62
    ids[0, 21 : 21 + IMAGE_TOKENS] = IMAGE
    pixels = torch.randn(256, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 16, 16]]),
    }  # fmt: skip


@torch.no_grad()
def output(model: Any, **inputs: Any) -> Tensor:
    result = model(**inputs)
    hidden: Tensor = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return hidden
