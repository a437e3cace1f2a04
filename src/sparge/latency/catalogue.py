"""The models: sizes from their public configs, inputs of their standard size, and the paper's figures for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

K = 1024


@dataclass(frozen=True)
class Paper:
    """What SpargeAttn's paper (arXiv 2502.18137) states of a model."""

    sparsity: float
    speedup: float | None = None  # end to end, original over SpargeAttn
    chip: str = ""


@dataclass(frozen=True)
class Model:
    """One model and one forward of it: a prefill, or a denoising step."""

    name: str
    title: str
    library: str
    kind: str  # the class
    config: dict[str, Any]
    sparsity: float  # asked for: this share of the blocks that a row sees is to be skipped
    text: int  # tokens of the prompt
    grid: tuple[int, int, int] | None = None  # frames, height and width of the visual tokens; None: there are none
    batch: int = 1  # 2 where the model's pipeline guides by a second prompt in the same forward
    paper: Paper | None = None  # None: not one of the paper's models

    @property
    def visual(self) -> int:
        return 0 if self.grid is None else math.prod(self.grid)


# huggingface.co/meta-llama/Llama-3.1-8B, config.json
LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 128000, "eos_token_id": 128001, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

# huggingface.co/THUDM/CogVideoX-2b, transformer/config.json; 49 frames of 480 x 720 are 13 latent frames of 60 x 90,
# patches of 2 x 2
COGVIDEOX = {
    "num_attention_heads": 30, "attention_head_dim": 64, "num_layers": 30, "in_channels": 16, "out_channels": 16,
    "time_embed_dim": 512, "text_embed_dim": 4096, "sample_width": 90, "sample_height": 60, "sample_frames": 49,
    "patch_size": 2, "max_text_seq_length": 226, "use_rotary_positional_embeddings": False,
}  # fmt: skip

# huggingface.co/genmo/mochi-1-preview, transformer/config.json; 84 frames of 480 x 848 are 14 latent frames of
# 60 x 106 (the 22K tokens of the paper)
MOCHI = {
    "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 48, "in_channels": 12, "patch_size": 2,
    "pooled_projection_dim": 1536, "text_embed_dim": 4096, "time_embed_dim": 256, "activation_fn": "swiglu",
    "max_sequence_length": 256,
}  # fmt: skip

# huggingface.co/Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan2.1-T2V-14B-Diffusers, transformer/config.json; 81 frames are
# 21 latent frames, of 60 x 104 at 480 x 832 and of 90 x 160 at 720 x 1280
WAN = {"attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256}
WAN_1_3B = {**WAN, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_14B = {**WAN, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}

# huggingface.co/hunyuanvideo-community/HunyuanVideo, transformer/config.json; 129 frames of 720 x 1280 are 33 latent
# frames of 90 x 160
HUNYUAN = {
    "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 20, "num_single_layers": 40,
    "num_refiner_layers": 2, "mlp_ratio": 4.0, "in_channels": 16, "out_channels": 16, "patch_size": 2,
    "patch_size_t": 1, "text_embed_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    "rope_axes_dim": (16, 56, 56),
}  # fmt: skip

# huggingface.co/black-forest-labs/FLUX.1-dev, transformer/config.json; 1024 x 1024 is a latent of 128 x 128, packed
# 2 x 2
FLUX = {
    "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38, "in_channels": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip

PAPER_MOCHI = Paper(0.47, 1897 / 1037, "L40")
VIDEO_SPARSITY = PAPER_MOCHI.sparsity  # also for video models that the paper does not have

# Short ones first: a run that is cut short has measured most models by then.
MODELS = (
    Model("flux", "Flux, 1024 x 1024", "diffusers", "FluxTransformer2DModel", FLUX, 0.38,
          text=512, grid=(1, 64, 64), paper=Paper(0.38)),
    Model("cogvideox", "CogVideoX-2B, 480 x 720, 49 frames", "diffusers", "CogVideoXTransformer3DModel", COGVIDEOX,
          0.46, text=226, grid=(13, 30, 45), batch=2, paper=Paper(0.46, 87 / 53, "RTX 4090")),
    Model("wan-1.3b", "Wan-1.3B, 480 x 832, 81 frames", "diffusers", "WanTransformer3DModel", WAN_1_3B, VIDEO_SPARSITY,
          text=512, grid=(21, 30, 52)),
    Model("llama-24k", "Llama-3.1-8B, 24K tokens", "transformers", "LlamaForCausalLM", LLAMA, 0.357,
          text=24 * K, paper=Paper(0.357, 4.01 / 2.6, "RTX 4090")),
    Model("mochi", "Mochi, 480 x 848, 84 frames", "diffusers", "MochiTransformer3DModel", MOCHI, 0.47,
          text=256, grid=(14, 30, 53), batch=2, paper=PAPER_MOCHI),
    Model("llama-128k", "Llama-3.1-8B, 128K tokens", "transformers", "LlamaForCausalLM", LLAMA, 0.54,
          text=128 * K, paper=Paper(0.54, 52 / 29.98, "L40")),
    Model("wan-14b", "Wan-14B, 720 x 1280, 81 frames", "diffusers", "WanTransformer3DModel", WAN_14B, VIDEO_SPARSITY,
          text=512, grid=(21, 45, 80)),
    Model("hunyuan", "HunyuanVideo, 720 x 1280, 129 frames", "diffusers", "HunyuanVideoTransformer3DModel", HUNYUAN,
          VIDEO_SPARSITY, text=256, grid=(33, 45, 80)),
)  # fmt: skip
