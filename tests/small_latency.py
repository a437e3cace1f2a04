"""The models of `sparge bench-models` with every size made small: the classes, inputs and patches are the real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparge.latency.catalogue import MODELS, Model

TEXT, GRID, IMAGE = 24, (4, 8, 10), (1, 16, 20)
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}
CHANNELS: dict[str, Any] = {"in_channels": 4, "out_channels": 4}
SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
    "FluxTransformer2DModel": {
        **HEADS, "in_channels": 8, "num_single_layers": 1, "joint_attention_dim": 16, "pooled_projection_dim": 16,
        "axes_dims_rope": (8, 12, 12),
    },
    "CogVideoXTransformer3DModel": {
        **HEADS, **CHANNELS, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 20, "sample_height": 16,
        "sample_frames": 13, "max_text_seq_length": TEXT,
    },
    "MochiTransformer3DModel": {
        **HEADS, "in_channels": 4, "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4,
        "max_sequence_length": TEXT,
    },
    "WanTransformer3DModel": {**HEADS, **CHANNELS, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32},
    "HunyuanVideoTransformer3DModel": {
        **HEADS, **CHANNELS, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16,
        "pooled_projection_dim": 8, "rope_axes_dim": (8, 12, 12),
    },
}  # fmt: skip
CALLS = {"llama": 2, "flux": 3, "cogvideox": 2, "mochi": 4, "wan": 2, "hunyuan": 3}  # mochi's: prompt by prompt


def small(model: Model) -> Model:
    config = {**model.config, **SIZES[model.kind]}
    if model.grid is None:
        return replace(model, config=config, text=640)
    return replace(model, config=config, text=TEXT, grid=IMAGE if model.grid[0] == 1 else GRID)


SMALL = {model.name: small(model) for model in MODELS}
