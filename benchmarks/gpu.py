"""sparge on one NVIDIA GPU against cuDNN bf16 dense attention in the same run; checks each result before timing it.

    python benchmarks/gpu.py --json results.json

Masks are random with the stated share of visible blocks skipped. The time counted is a whole call: checking the
inputs, preparation, the default predictor (its own mask is discarded) and attention over the random mask. `graph`
replays the same from one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparge
from sparge.backends.triton.launch import TritonBackend
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, prepare_inputs

MAX_RELATIVE_L1 = {"none": 0.01, "int8": 0.03, "int8-fp8": 0.06}
CASES = [
    # tokens, head_dim, causal, sparsity, quantization
    *((32768, 128, False, sparsity, "int8-fp8") for sparsity in (0.0, 0.6, 0.8)),
    *((32768, 128, False, 0.6, quantization) for quantization in ("int8", "none")),
    (32768, 128, True, 0.6, "int8-fp8"),
    (32768, 64, False, 0.6, "int8-fp8"),
    (32768, 256, False, 0.6, "int8-fp8"),
    *((tokens, 128, False, 0.6, "int8-fp8") for tokens in (16384, 8192, 4096)),
]


@dataclass(frozen=True)
class Row:
    """One measured case; times are medians in milliseconds, ratios are cuDNN's time over ours."""

    tokens: int
    head_dim: int
    causal: bool
    sparsity: float
    quantization: str
    cudnn_ms: float
    prepare_ms: float
    select_ms: float
    attend_ms: float
    total_ms: float
    graph_ms: float
    total_ratio: float
    graph_ratio: float
    kernel_ratio: float
    prediction_share: float  # preparation and selection, of cuDNN's time
    relative_l1: float


def random_mask(inputs: Inputs, sparsity: float, config: SparseConfig) -> BlockMask:
    sight = inputs.visibility
    visible = sight.blocks(*config.block)
    kept = torch.rand(1, inputs.query.shape[1], *visible.shape[2:], device="cuda") >= sparsity
    if sight.right_bounded:
        kept |= sight.right_edge(*config.block)
    kept[..., 0] = True
    return BlockMask.from_dense(kept & visible, sight.q_len, sight.k_len, config.block, sight)


def relative_l1(inputs: Inputs, mask: BlockMask, values: torch.Tensor) -> float:
    """Against float64 attention over the mask, on sampled heads and query blocks."""
    rows_per_block, keys_per_block = mask.block
    dense, error, size = mask.to_dense()[0], 0.0, 0.0
    for head in (0, inputs.query.shape[1] - 1):
        for i in (0, mask.q_blocks // 2, mask.q_blocks - 1):
            rows = range(i * rows_per_block, min((i + 1) * rows_per_block, mask.q_len))
            seen = inputs.visibility.pairs(rows, range(mask.k_len))[0, 0]
            seen &= dense[head, i].repeat_interleave(keys_per_block)[: mask.k_len]
            part = inputs.query[0, head, rows.start : rows.stop].double()
            scores = torch.where(seen, part @ inputs.key[0, head].double().T * inputs.scale, -torch.inf)
            exact = scores.softmax(-1) @ inputs.value[0, head].double()
            error += float((values[0, head, rows.start : rows.stop] - exact).abs().sum())
            size += float(exact.abs().sum())
    return error / size


def milliseconds(action: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(action, warmup=20, rep=100, return_mode="median"))


def measure(tokens: int, head_dim: int, causal: bool, sparsity: float, quantization: str) -> Row:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 32, tokens, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    inputs = prepare_inputs(query, key, value, is_causal=causal, needs_lse=False)
    backend, config = TritonBackend(), SparseConfig(quantization=quantization)
    mask = random_mask(inputs, sparsity, config)
    blocks = backend.summarize(inputs, config)

    def everything() -> torch.Tensor:
        checked = prepare_inputs(query, key, value, is_causal=causal, needs_lse=False)
        blocks = backend.summarize(checked, config)
        backend.select(blocks, config)
        return backend.attend(blocks, mask, config).values

    error = relative_l1(inputs, mask, everything())
    if not error <= MAX_RELATIVE_L1[quantization]:
        raise SystemExit(f"wrong result: relative L1 {error} at {tokens} tokens; no speed is printed for it")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        dense = milliseconds(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    total, replay = milliseconds(everything), milliseconds(graph.replay)
    attend = milliseconds(lambda: backend.attend(blocks, mask, config))
    prepare = milliseconds(lambda: backend.summarize(inputs, config))
    select = milliseconds(lambda: backend.select(blocks, config))
    return Row(
        tokens, head_dim, causal, float(mask.sparsity), quantization, dense, prepare, select, attend, total, replay,
        dense / total, dense / replay, dense / attend, (prepare + select) / dense, error,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        row = measure(*case)
        rows.append(row)
        print(
            f"{row.tokens:6d} D{row.head_dim:<3d} {'causal' if row.causal else 'full  '} {row.sparsity:4.0%} "
            f"{row.quantization:8s} cuDNN {row.cudnn_ms:.3f} ms  ours {row.total_ms:.3f} ms  {row.total_ratio:.2f}x  "
            f"graph {row.graph_ratio:5.2f}x  kernel {row.kernel_ratio:5.2f}x  prepare {row.prepare_ms:.3f} ms  "
            f"select {row.select_ms:.3f} ms  prediction {row.prediction_share:.2%}  relative L1 {row.relative_l1:.4f}",
            flush=True,
        )
    if options.json:
        versions = {name: metadata.version(name) for name in ("torch", "triton")} | {"sparge": sparge.__version__}
        facts = {"gpu": torch.cuda.get_device_name(), "heads": 32, "dtype": "bfloat16", **versions}
        options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
