"""Models of diffusers built from small configs with random weights, and inputs for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers")

BATCH, TEXT = 2, 7
FRAMES, HEIGHT, WIDTH = 3, 6, 10  # of the grid of tokens


@dataclass(frozen=True)
class Small:
    """A model's class, its config, and what its forward takes."""

    kind: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    grid: tuple[int, int, int] = (FRAMES, HEIGHT, WIDTH)
    text: int = TEXT  # tokens beside the visual ones in its attention
    calls: int = 2  # of attention over the visual tokens, per forward

    def built(self, **more: Any) -> Any:
        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**{**self.config, **more}).eval()
        for name, parameter in model.named_parameters():  # some begin at 0 or 1, which would hide a wrong order
            if "frequencies" in name or parameter.dim() == 1:
                torch.nn.init.normal_(parameter, std=0.3)
        return model


def ids(*sizes: tuple[int, int]) -> Tensor:
    """Flux's position ids of pictures [tokens, 3]."""
    parts = [
        torch.cartesian_prod(*map(torch.arange, (1, *size))) + torch.tensor([n, 0, 0]) for n, size in enumerate(sizes)
    ]
    return torch.cat(parts).float()


def text(channels: int, length: int = TEXT) -> Tensor:
    return torch.randn(BATCH, length, channels)


def text_mask(length: int = TEXT) -> Tensor:
    """The second prompt is shorter."""
    mask = torch.ones(BATCH, length)
    mask[1, 4:] = 0
    return mask


def _all() -> dict[str, Small]:
    torch.manual_seed(1)
    step = torch.tensor([500.0] * BATCH)
    video = torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH)
    heads = {"num_attention_heads": 2, "attention_head_dim": 24}
    return {
        "flux": Small(
            "FluxTransformer2DModel",
            {
                **heads, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 16,
                "pooled_projection_dim": 16, "axes_dims_rope": (8, 8, 8),
            },
            {
                "hidden_states": torch.randn(BATCH, 180, 8), "encoder_hidden_states": text(16), "timestep": step / 1000,
                "pooled_projections": torch.randn(BATCH, 16), "img_ids": ids((18, 10)), "txt_ids": torch.zeros(TEXT, 3),
            },
            grid=(1, 18, 10),
        ),
        "sd3": Small(
            "SD3Transformer2DModel",
            {
                **heads, "sample_size": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2,
                "joint_attention_dim": 16, "caption_projection_dim": 48, "pooled_projection_dim": 16,
                "pos_embed_max_size": 32, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
            },
            {
                "hidden_states": torch.randn(BATCH, 4, 36, 20), "encoder_hidden_states": text(16), "timestep": step,
                "pooled_projections": torch.randn(BATCH, 16),
            },
            grid=(1, 18, 10),
            calls=3,
        ),
        "cogvideox": Small(
            "CogVideoXTransformer3DModel",
            {
                **heads, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16,
                "num_layers": 2, "sample_width": 2 * WIDTH, "sample_height": 2 * HEIGHT, "sample_frames": 9,
                "max_text_seq_length": TEXT, "use_rotary_positional_embeddings": True,
            },
            {
                "hidden_states": video.transpose(1, 2), "encoder_hidden_states": text(16), "timestep": step,
                "image_rotary_emb": tuple(torch.randn(2, FRAMES * HEIGHT * WIDTH, 24)),
            },
        ),
        "wan": Small(
            "WanTransformer3DModel",
            {
                **heads, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32,
                "num_layers": 2,
            },
            {"hidden_states": video, "timestep": step, "encoder_hidden_states": text(16)},
            text=0,
        ),
        "hunyuan": Small(
            "HunyuanVideoTransformer3DModel",
            {
                **heads, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
                "num_refiner_layers": 1, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (8, 8, 8),
            },
            {
                "hidden_states": video, "timestep": step, "encoder_hidden_states": text(16),
                "encoder_attention_mask": text_mask(), "pooled_projections": torch.randn(BATCH, 8),
                "guidance": torch.tensor([6000.0] * BATCH),
            },
        ),
        "ltx": Small(
            "LTXVideoTransformer3DModel",
            {
                **heads, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 48, "num_layers": 2,
                "caption_channels": 16,
            },
            {
                "hidden_states": torch.randn(BATCH, FRAMES * HEIGHT * WIDTH, 8), "encoder_hidden_states": text(16),
                "timestep": step, "encoder_attention_mask": text_mask(), "num_frames": FRAMES, "height": HEIGHT,
                "width": WIDTH, "rope_interpolation_scale": (0.3, 20.0, 20.0),
            },
            text=0,
        ),
        "mochi": Small(
            "MochiTransformer3DModel",
            {
                **heads, "in_channels": 4, "num_layers": 2, "pooled_projection_dim": 16, "text_embed_dim": 16,
                "time_embed_dim": 4, "activation_fn": "swiglu", "max_sequence_length": TEXT,
            },
            {
                "hidden_states": video, "encoder_hidden_states": text(16), "timestep": step,
                "encoder_attention_mask": text_mask().bool(),
            },
            calls=4,  # prompt by prompt
        ),
    }  # fmt: skip


SMALL = _all()


def output(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]
