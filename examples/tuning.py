"""Settings per layer and head for a model that is not of transformers: search, save, load, use.

python examples/tuning.py [PROFILE]
"""

import sys
from pathlib import Path

import torch

import sparge

path = Path(sys.argv[1] if len(sys.argv) > 1 else "mine.safetensors")


def tensors(layer: int, seed: int) -> torch.Tensor:
    """What the layers of your model would attend with."""
    generator = torch.Generator().manual_seed(10 * seed + layer)
    return torch.randn(3, 1, 4, 1024, 64, generator=generator).cumsum(-2) / (4 + 4 * layer)


def run(seed: int, attend) -> None:  # runs the model, each attention layer by `attend`
    for layer in range(2):
        attend(f"layers.{layer}", *tensors(layer, seed), is_causal=True)


sparge.tune(run, [0, 1], l1=0.03, name="mine").save(path)

profile = sparge.Profile.load(path)
print(profile)
for layer in range(2):
    config = profile.config_for(f"layers.{layer}")
    out, stats = sparge.attention(*tensors(layer, 2), is_causal=True, config=config, return_stats=True)
    print(f"layers.{layer}: {stats.sparsity_per_head[0].tolist()}")
