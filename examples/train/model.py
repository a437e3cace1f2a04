"""A small diffusion transformer on pixels, for clips and images alike: an image is a clip of one frame.

Every token is a patch of one frame, and attends to all others through torch's scaled_dot_product_attention, which is
where sparge comes in. Positions are rotary in time, height and width, so the weights hold for any grid; Fourier
features of the place say where the edges are.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import sparge
from examples.train.errors import ExampleError

FORMAT = "sparge-example-dit"
HEAD_DIM = 64
MLP_RATIO = 3
TIME_FEATURES = 128
PLACE_FREQUENCIES = 6  # octaves, for each of the three axes
ROPE_BASE = 100.0  # turns slowly enough for the longest side, 64 patches


class WeightsError(ExampleError):
    """Weights that are not there, or not of this model; the message is one sentence."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of, and the clips it was made for."""

    frames: int
    side: int  # pixels
    patch: int  # pixels
    channels: int
    depth: int
    classes: int

    def __post_init__(self) -> None:
        if self.channels % HEAD_DIM:
            raise ValueError(f"channels must be a multiple of {HEAD_DIM}, not {self.channels}.")
        if self.side % (2 * self.patch):
            raise ValueError(f"a side of {self.side} is no even number of patches of {self.patch}.")

    @property
    def heads(self) -> int:
        return self.channels // HEAD_DIM

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.frames, self.side // self.patch, self.side // self.patch)

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)


class Attention(nn.Module):
    """Every token with every other; queries and keys are normalised before their rotation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // HEAD_DIM
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.query_scale, self.key_scale = nn.Parameter(torch.ones(HEAD_DIM)), nn.Parameter(torch.ones(HEAD_DIM))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        query = rotated(normalised(query, self.query_scale), rotation).to(value.dtype)
        key = rotated(normalised(key, self.key_scale), rotation).to(value.dtype)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then an MLP, each scaled, shifted and gated by the time and the class."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = Attention(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, MLP_RATIO * channels), nn.GELU("tanh"), nn.Linear(MLP_RATIO * channels, channels)
        )
        self.modulation = nn.Parameter(torch.zeros(6, channels))  # what this block adds to the modulation of all

    def forward(self, x: Tensor, modulation: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        parts = (modulation + self.modulation)[:, :, None].unbind(1)
        x = x + parts[2] * self.attention(modulated(x, *parts[:2]), rotation)
        return x + parts[5] * self.mlp(modulated(x, *parts[3:5]))


@dataclass(frozen=True, eq=False)
class Layout:
    """All that depends on where the tokens stand, in their order."""

    order: sparge.TokenOrder
    features: Tensor
    rotation: tuple[Tensor, Tensor]


class VideoTransformer(nn.Module):
    """Predicts the velocity from noise to clip: forward(pixels, times, labels); label `classes` means any."""

    def __init__(self, config: ModelConfig, order: str = "row") -> None:
        super().__init__()
        self.config = config
        self.order = order  # of the tokens between embedding and output; it changes no result but for rounding
        self._layouts: dict[object, Layout] = {}
        channels, values = config.channels, 3 * config.patch**2
        self.embed = nn.Linear(values, channels)
        self.place = nn.Linear(6 * PLACE_FREQUENCIES, channels)
        self.time = nn.Sequential(nn.Linear(TIME_FEATURES, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.label = nn.Embedding(config.classes + 1, channels)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(channels, 6 * channels))
        self.blocks = nn.ModuleList(Block(channels) for _ in range(config.depth))
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(channels, 2 * channels))
        self.final = nn.Linear(channels, values)
        self._initialise()

    def forward(self, pixels: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """pixels [batch, frames, height, width, 3], times [batch] from 0 (noise) to 1, labels [batch]."""
        patch, dtype = self.config.patch, self.embed.weight.dtype
        grid = (pixels.shape[1], pixels.shape[2] // patch, pixels.shape[3] // patch)
        layout = self._layout(grid, pixels.device)
        x = self.embed(layout.order.apply(patches(pixels, patch)).to(dtype)) + self.place(layout.features.to(dtype))
        condition = self.time(time_features(times).to(dtype)) + self.label(labels)
        modulation = self.modulation(condition).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, modulation, layout.rotation)
        shift, scale = self.final_modulation(condition)[:, None].chunk(2, dim=-1)
        tokens = layout.order.restore(self.final(modulated(x, shift, scale)))
        return pixels_of(tokens.float(), grid, patch)

    def _layout(self, grid: tuple[int, int, int], device: torch.device) -> Layout:
        """Made once for each grid and order."""
        key = (grid, self.order, device)
        if key not in self._layouts:
            order = sparge.token_order(grid, self.order, device=device)
            places = order.apply(self._places(grid, device))
            self._layouts[key] = Layout(order, place_features(places, self.config.grid), rotation_of(places))
        return self._layouts[key]

    def _places(self, grid: tuple[int, int, int], device: torch.device) -> Tensor:
        """Where the tokens stand, in cells of the full grid: those of a coarser one lie between them."""
        axes = []
        for cells, full in zip(grid, self.config.grid, strict=True):
            axes.append((torch.arange(cells, device=device, dtype=torch.float32) + 0.5) * (full / cells) - 0.5)
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.label.weight, std=0.02)
        for layer in (self.modulation[1], self.final_modulation[1], self.final):  # each block starts as the identity
            nn.init.zeros_(layer.weight)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """In float32, whatever comes in: scores are sensitive to it."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def patches(pixels: Tensor, patch: int) -> Tensor:
    """[batch, tokens, values]"""
    cut = pixels.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [batch, frames, rows, patch, columns, patch, 3]
    return cut.transpose(3, 4).flatten(4).flatten(1, 3)


def pixels_of(tokens: Tensor, grid: tuple[int, int, int], patch: int) -> Tensor:
    """The inverse of `patches`."""
    cut = tokens.unflatten(1, grid).unflatten(-1, (patch, patch, 3))
    return cut.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def time_features(times: Tensor) -> Tensor:
    half = TIME_FEATURES // 2
    speeds = torch.exp(-math.log(10_000) * torch.arange(half, device=times.device) / half)
    angles = 1000 * times[:, None].float() * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def place_features(places: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """[tokens, 6 * PLACE_FREQUENCIES]"""
    shares = (places + 0.5) / places.new_tensor(grid)
    octaves = math.pi * 2 ** torch.arange(PLACE_FREQUENCIES, device=places.device)
    angles = (shares[:, :, None] * octaves).flatten(1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotation_of(places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, HEAD_DIM / 2]: a quarter of the channels turns with time, the rest with place."""
    pairs = HEAD_DIM // 2
    shares = (pairs // 4, 3 * pairs // 8, 3 * pairs // 8)
    angles = []
    for axis, count in enumerate(shares):
        speeds = ROPE_BASE ** (-torch.arange(count, device=places.device) / count)
        angles.append(places[:, axis, None] * speeds)
    joined = torch.cat(angles, dim=-1)
    return joined.cos(), joined.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


# ---- what a step costs


def forward_flops(config: ModelConfig, grid: tuple[int, int, int] | None = None) -> tuple[float, float]:
    """Of one clip: those of the weights, and those of attention. Training takes 3 and 3.5 times as many."""
    tokens = math.prod(grid or config.grid)
    weights = config.depth * (4 + 2 * MLP_RATIO) * config.channels**2
    return 2.0 * weights * tokens, 4.0 * config.depth * config.channels * tokens**2


# ---- files


def save_weights(model: VideoTransformer, path: Path, facts: dict[str, str]) -> None:
    """In bfloat16: half of the bytes, and what sampling computes with."""
    tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": FORMAT, "config": json.dumps(asdict(model.config)), **facts})


def load_weights(path: Path, order: str = "hilbert") -> tuple[VideoTransformer, dict[str, str]]:
    """The model, in float32, and what its file says about it."""
    if not path.is_file():
        raise WeightsError(f"there are no weights in {path}: train them with python -m examples.train.train.")
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise WeightsError(f"{path} does not hold weights of examples/train.")
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    model = VideoTransformer(ModelConfig(**json.loads(facts["config"])), order)
    model.load_state_dict(tensors)
    return model.eval(), facts
