"""A video transformer of diffusers with its tokens in Hilbert order, against dense. Random weights: only the wiring.

python examples/video.py
"""

import torch
from diffusers import WanTransformer3DModel

import sparge
from sparge.observe import observed

torch.manual_seed(0)
transformer = WanTransformer3DModel(  # yours: pipe.transformer
    num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, ffn_dim=64, num_layers=2, text_dim=16,
    freq_dim=16,
).eval()  # fmt: skip
video = {"hidden_states": torch.randn(1, 4, 6, 32, 48), "encoder_hidden_states": torch.randn(1, 7, 16)}
print(sparge.patch(transformer, dry_run=True))

with torch.no_grad():
    dense = transformer(**video, timestep=torch.tensor([500])).sample
    for name, config in {
        "everything kept": sparge.SparseConfig(rule="topk", topk=1.0, quantization="none"),
        "the better half": sparge.SparseConfig(rule="topk", topk=0.5, quantization="none"),
    }.items():
        with sparge.patch(transformer, config), observed() as seen:
            sparse = transformer(**video, timestep=torch.tensor([500])).sample
        error = (sparse - dense).abs().sum() / dense.abs().sum()
        print(f"{name}: {1 - seen.executed / seen.visible:.0%} skipped, relative L1 of the sample {error:.1e}")
