"""A mask of one's own: local blocks and a few global ones, alone and together with what sparge predicts.

python examples/custom_mask.py
"""

import torch

import sparge

tokens, block = 2048, (128, 64)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, tokens, 64).cumsum(-2) / 8
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

rows = torch.arange(0, tokens, block[0])[:, None]
keys = torch.arange(0, tokens, block[1])[None]
near = (keys > rows - 256) & (keys < rows + block[0])
everywhere = (keys < 128).expand_as(near)  # the first 128 tokens are seen by all
mine = sparge.BlockMask.from_dense(near | everywhere, tokens, tokens, block)
predicted = sparge.predict_mask(q, k, is_causal=True)

print(mine.picture())
for name, mask in {"mine": mine, "predicted": predicted, "either": mine | predicted}.items():
    out, stats = sparge.block_sparse_attention(q, k, v, mask, is_causal=True, return_stats=True)
    error = (out - exact).abs().sum() / exact.abs().sum()
    print(f"{name:9}  {stats.sparsity:.0%} of visible blocks skipped, relative L1 {error:.4f}")
