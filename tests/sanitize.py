"""Every kernel on small shapes, for compute-sanitizer: make sanitize. With `portable`, without those for Hopper."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import sparge
from sparge import SparseConfig
from sparge.backends.hopper.launch import WIDE_FROM, HopperBackend


def main() -> None:
    if sys.argv[1:] == ["portable"]:
        HopperBackend.unavailable = lambda self: "left out"
    torch.manual_seed(0)
    for quantization in ("none", "int8", "int8-fp8"):
        for dim, block, is_causal in ((64, (128, 64), True), (80, (64, 32), False), (256, (128, 128), True)):
            config = SparseConfig(
                rule=("gap", "cdf", "probe"), gap=0.5, cdf=0.5, quantization=quantization, block=block,
                similarity=0.0, pv_threshold=-2.0 if is_causal else None,
            )  # fmt: skip
            q = torch.randn(1, 4, 200, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(1, 2, 333, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            padding = torch.rand(1, 1, 1, 333, device="cuda") < 0.9
            sparge.attention(q, k, v, padding, is_causal=is_causal, enable_gqa=True, config=config, return_lse=True)
            strict = replace(config, max_error=0.1)
            sparge.attention(q, k, v, is_causal=is_causal, enable_gqa=True, config=strict, return_lse=True)
            ends = [torch.tensor(n, device="cuda") for n in ([0, 70, 200], [0, 130, 333])]
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            sparge.varlen_attention(*packed, *ends, 130, 203, is_causal, config=config, return_lse=True)
    # Steps of 128 keys, and of 256, and keys too wide for these
    for tokens, dim in ((333, 128), (max(WIDE_FROM.values()) + 333, 128), (max(WIDE_FROM.values()) + 333, 192)):
        q = torch.randn(1, 4, 200, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 2, tokens, n, device="cuda", dtype=torch.bfloat16) for n in (dim, 128))
        for is_causal, threshold in ((False, None), (True, None), (True, -2.0)):
            config = SparseConfig(quantization="int8-fp8", pv_threshold=threshold)
            sparge.attention(q, k, v, is_causal=is_causal, enable_gqa=True, config=config)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
