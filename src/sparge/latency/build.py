"""A model with random weights and inputs of the size that the catalogue names, made on the device itself."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.latency.catalogue import Model

PATCH = 2  # sides of the patches of all video models here; none joins frames


@dataclass(frozen=True)
class Place:
    """Where tensors are made, and of which type."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def full(self, length: int, value: float, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full((length,), value, device=self.device, dtype=dtype or self.dtype)


def missing_library(model: Model) -> str | None:
    """Why this machine cannot build the model, or None."""
    if importlib.util.find_spec(model.library) is None:
        return f"{model.title} is built by {model.library}, which is not installed: pip install {model.library}."
    return None


def build(model: Model, place: Place) -> Any:
    """The model in evaluation mode, with the weights that its library starts training from."""
    library = importlib.import_module(model.library)
    kind = getattr(library, model.kind)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(place.dtype)
    try:
        with torch.device(place.device):  # 14 billion weights are made there in a moment, and on a CPU in minutes
            if model.library == "transformers":
                network = kind(kind.config_class(**model.config))
            else:
                network = kind(**model.config)
    finally:
        torch.set_default_dtype(usual)
    return network.to(place.device).eval()  # tables made by numpy are still elsewhere


def make_inputs(model: Model, network: Any, place: Place) -> dict[str, Any]:
    """The arguments of one forward."""
    return INPUTS[model.kind](model, network.config, place)


def _prefill(model: Model, config: Any, place: Place) -> dict[str, Any]:
    """The whole prompt, into a cache; of the logits only the last token's, which is all that decoding needs."""
    ids = torch.randint(config.vocab_size, (model.batch, model.text), device=place.device)
    return {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}


def _flux(model: Model, config: Any, place: Place) -> dict[str, Any]:
    assert model.grid is not None
    _, height, width = model.grid
    places = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(height), torch.arange(width))
    return {
        "hidden_states": place.normal(model.batch, model.visual, config.in_channels),
        "encoder_hidden_states": place.normal(model.batch, model.text, config.joint_attention_dim),
        "pooled_projections": place.normal(model.batch, config.pooled_projection_dim),
        "timestep": place.full(model.batch, 0.5),
        "guidance": place.full(model.batch, 3.5),
        "img_ids": places.to(place.device, place.dtype),
        "txt_ids": torch.zeros(model.text, 3, device=place.device, dtype=place.dtype),
    }


def _video(model: Model, config: Any, place: Place) -> Tensor:
    """[B, C, frames, height, width]"""
    assert model.grid is not None
    frames, height, width = model.grid
    return place.normal(model.batch, config.in_channels, frames, PATCH * height, PATCH * width)


def _cogvideox(model: Model, config: Any, place: Place) -> dict[str, Any]:
    return {
        "hidden_states": _video(model, config, place).transpose(1, 2).contiguous(),
        "encoder_hidden_states": place.normal(model.batch, model.text, config.text_embed_dim),
        "timestep": place.full(model.batch, 500, torch.int64),
    }


def _mochi(model: Model, config: Any, place: Place) -> dict[str, Any]:
    return {
        "hidden_states": _video(model, config, place),
        "encoder_hidden_states": place.normal(model.batch, model.text, config.text_embed_dim),
        "timestep": place.full(model.batch, 500),
        "encoder_attention_mask": torch.ones(model.batch, model.text, device=place.device, dtype=torch.bool),
    }


def _wan(model: Model, config: Any, place: Place) -> dict[str, Any]:
    return {
        "hidden_states": _video(model, config, place),
        "encoder_hidden_states": place.normal(model.batch, model.text, config.text_dim),
        "timestep": place.full(model.batch, 500, torch.int64),
    }


def _hunyuan(model: Model, config: Any, place: Place) -> dict[str, Any]:
    return {
        "hidden_states": _video(model, config, place),
        "encoder_hidden_states": place.normal(model.batch, model.text, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(model.batch, model.text, device=place.device, dtype=place.dtype),
        "pooled_projections": place.normal(model.batch, config.pooled_projection_dim),
        "timestep": place.full(model.batch, 500, torch.int64),
        "guidance": place.full(model.batch, 6000),
    }


INPUTS: dict[str, Callable[[Model, Any, Place], dict[str, Any]]] = {
    "LlamaForCausalLM": _prefill,
    "FluxTransformer2DModel": _flux,
    "CogVideoXTransformer3DModel": _cogvideox,
    "MochiTransformer3DModel": _mochi,
    "WanTransformer3DModel": _wan,
    "HunyuanVideoTransformer3DModel": _hunyuan,
}
