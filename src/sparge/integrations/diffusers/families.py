"""The models of diffusers that sparge knows: which layers to take, where text and pictures stand, how tokens come in.

Inside the blocks all but attention and the rotary embedding is done token by token, so the visual tokens can be put in
order once, right after they are embedded, and put back right before the output layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparge.integrations.diffusers.order import Grid, Layout

Arguments = Mapping[str, Any]  # of the model's forward, by name
Embedded = Callable[[Tensor, Layout], Tensor]

CROSS = "cross-attention to a short text gains nothing"
TEXT_ONLY = "its tokens are text"
NONE_OTHER = "it does not attend over the picture"
PLACELESS = ("scale", "ip_adapter_image_embeds", "ip_hidden_states")  # what blocks may get without knowing our order


@dataclass(frozen=True)
class Family:
    """One model class. Submodules go by name; where the caller makes the rotary embedding, it is an argument."""

    layers: tuple[str, ...]  # patterns of those that attend over every visual token
    grids: Callable[[Any, Arguments], tuple[Grid, ...]]  # of the model's config and a call; ValueError: why not
    text_first: bool
    embedding: str
    embedded: Embedded  # puts the output of `embedding` in order
    last: str  # first to see the visual tokens after the blocks
    rotary: str | None = None
    rotary_argument: str | None = None
    rotary_dim: int = 0  # of the tokens, in each tensor of the rotary embedding
    by_token: tuple[str, ...] = ()  # arguments that hold something per token, in raster order
    others: str = NONE_OTHER  # why other attention layers are left alone


# ---- how the embedded tokens lie in memory


def _sequence(x: Tensor, layout: Layout) -> Tensor:
    """[B, tokens, C]"""
    return layout.apply(x, 1)


def _channels_first(x: Tensor, layout: Layout) -> Tensor:
    """[B, C, frames, height, width]"""
    return layout.apply(x.flatten(2), 2).view(x.shape)


def _frames(x: Tensor, layout: Layout) -> Tensor:
    """[B * frames, height * width, C]"""
    return layout.apply(x.reshape(-1, layout.visual, x.shape[-1]), 1).view(x.shape)


# ---- the true grid of a call


def _image(config: Any, arguments: Arguments) -> tuple[Grid, ...]:
    height, width = arguments["hidden_states"].shape[-2:]
    return ((1, height // config.patch_size, width // config.patch_size),)


def _video(config: Any, arguments: Arguments) -> tuple[Grid, ...]:
    frames, height, width = arguments["hidden_states"].shape[-3:]
    patch = config.patch_size
    sides = tuple(patch) if isinstance(patch, (tuple, list)) else (config.get("patch_size_t") or 1, patch, patch)
    return ((frames // sides[0], height // sides[1], width // sides[2]),)


def _frames_before_channels(config: Any, arguments: Arguments) -> tuple[Grid, ...]:
    _, frames, _, height, width = arguments["hidden_states"].shape
    return ((frames // (config.patch_size_t or 1), height // config.patch_size, width // config.patch_size),)


def _told(config: Any, arguments: Arguments) -> tuple[Grid, ...]:
    sides = [arguments.get(name) for name in ("num_frames", "height", "width")]
    frames, height, width = (0 if side is None else int(side) for side in sides)
    if 0 in (frames, height, width):
        raise ValueError("the call does not say num_frames, height and width.")
    _check_count(((frames, height, width),), arguments["hidden_states"].shape[1])
    return ((frames, height, width),)


# Position ids are read once, not at each step: reading waits for the device. Values are (version, grids).
_grids_of_ids: Any = WeakTensorKeyDictionary()


def _by_ids(config: Any, arguments: Arguments) -> tuple[Grid, ...]:
    """From position ids [tokens, (picture, row, column)]: one grid per picture."""
    ids = arguments.get("img_ids")
    if not isinstance(ids, Tensor):
        raise ValueError("the call has no img_ids.")
    now = 0 if ids.is_inference() else ids._version  # tensors of torch.inference_mode have no version
    version, grids = _grids_of_ids.get(ids, (-1, ()))
    if version != now:
        grids = _read_ids(ids)
        _grids_of_ids[ids] = (now, grids)
    _check_count(grids, arguments["hidden_states"].shape[1])
    found: tuple[Grid, ...] = grids
    return found


def _read_ids(ids: Tensor) -> tuple[Grid, ...]:
    places = (ids[0] if ids.dim() == 3 else ids).detach().cpu().long()
    _, counts = torch.unique_consecutive(places[:, 0], return_counts=True)
    grids = []
    for picture in places.split(counts.tolist()):
        rows, columns = (picture[:, axis] - picture[0, axis] for axis in (1, 2))
        height, width = int(rows.max()) + 1, int(columns.max()) + 1
        raster = torch.arange(height * width)
        if len(raster) != len(rows) or (rows * width + columns).ne(raster).any():
            raise ValueError("its img_ids are not those of whole pictures, row by row.")
        grids.append((1, height, width))
    return tuple(grids)


def _check_count(grids: tuple[Grid, ...], tokens: int) -> None:
    if Layout(grids, True).visual != tokens:
        shown = " and ".join(" x ".join(map(str, grid)) for grid in grids)
        raise ValueError(f"its {tokens} visual tokens are not a grid of {shown}.")


FAMILIES: dict[str, Family] = {
    "FluxTransformer2DModel": Family(
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        grids=_by_ids,
        text_first=True,
        embedding="x_embedder",
        embedded=_sequence,
        last="norm_out",
        rotary="pos_embed",
        by_token=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    "SD3Transformer2DModel": Family(
        layers=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
        grids=_image,
        text_first=False,
        embedding="pos_embed",
        embedded=_sequence,
        last="norm_out",
        by_token=("block_controlnet_hidden_states",),
    ),
    "CogVideoXTransformer3DModel": Family(
        layers=("transformer_blocks.*.attn1",),
        grids=_frames_before_channels,
        text_first=True,
        embedding="patch_embed",
        embedded=_sequence,
        last="norm_final",
        rotary_argument="image_rotary_emb",
    ),
    "WanTransformer3DModel": Family(
        layers=("blocks.*.attn1",),
        grids=_video,
        text_first=False,
        embedding="patch_embedding",
        embedded=_channels_first,
        last="norm_out",
        rotary="rope",
        rotary_dim=1,
        others=CROSS,
    ),
    "HunyuanVideoTransformer3DModel": Family(
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        grids=_video,
        text_first=False,
        embedding="x_embedder",
        embedded=_sequence,
        last="norm_out",
        rotary="rope",
        others=TEXT_ONLY,
    ),
    "LTXVideoTransformer3DModel": Family(
        layers=("transformer_blocks.*.attn1",),
        grids=_told,
        text_first=False,
        embedding="proj_in",
        embedded=_sequence,
        last="norm_out",
        rotary="rope",
        rotary_dim=1,
        others=CROSS,
    ),
    "MochiTransformer3DModel": Family(
        layers=("transformer_blocks.*.attn1",),
        grids=_video,
        text_first=False,
        embedding="patch_embed",
        embedded=_frames,
        last="norm_out",
        rotary="rope",
    ),
}


def family_of(model: Any) -> Family | None:
    """None: sparge does not know where the tokens of this model stand."""
    kind = type(model)
    return FAMILIES.get(kind.__name__) if kind.__module__.startswith("diffusers.") else None


def why_not_once(model: Any, family: Family, arguments: Arguments) -> str | None:
    """What keeps the tokens of a call from being put in order once for all layers, or None."""
    if getattr(model, "_parallel_config", None) is not None:
        return "the sequence is split over devices before the blocks"
    if model.config.get("image_condition_type") == "token_replace":
        return "the blocks treat the first frame's tokens apart, by their place"
    timestep = arguments.get("timestep")
    if isinstance(timestep, Tensor) and timestep.numel() > arguments["hidden_states"].shape[0]:
        return "each token has a timestep of its own"
    for name in family.by_token:
        if arguments.get(name) is not None:
            return f"{name} are added between the blocks, token by token"
    for name in ("attention_kwargs", "joint_attention_kwargs"):
        unknown = [key for key in arguments.get(name) or {} if key not in PLACELESS]
        if unknown:
            return f"{name} hold {unknown[0]}, which may go by place"
    names = (family.embedding, family.last, family.rotary)
    if any(is_compiled(model.get_submodule(name)) for name in names if name is not None):
        return "the modules before and after the blocks are compiled"
    return None


def is_compiled(module: Any) -> bool:
    """By torch.compile, in place or as what it returns."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
