"""The CPU engine against torch SDPA on the same machine, prediction included; checks each result before timing it.

    python benchmarks/cpu.py              the grid of the stated bars (about four minutes on two cores)
    python benchmarks/cpu.py --quick      one small shape

Masks are random with exactly the stated share of each row's visible blocks, so that sparsity is what it says; the
time counted is that of the default predictor on the same inputs (its own mask is discarded) plus attention over the
random mask.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import sparge
from sparge.backends.cpu.launch import CpuBackend
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, prepare_inputs

HEADS = 4
BARS = {(False, 0.6): 2.0, (True, 0.6): 1.7, (False, 0.8): 3.5, (True, 0.8): 3.5}
MAX_ERROR = 1e-5
MAX_EXTRA_MEMORY = 0.25


@dataclass(frozen=True)
class Row:
    """One measured case. Seconds are medians; extra memory is a share of Q + K + V + O."""

    tokens: int
    head_dim: int
    causal: bool
    sparsity: float
    dense_seconds: float
    sparse_seconds: float
    predict_seconds: float
    speedup: float
    bar: float
    max_error: float
    extra_memory: float


def random_mask(inputs: Inputs, sparsity: float, generator: torch.Generator) -> BlockMask:
    """Keeps the same share of visible blocks in every row, the diagonal among them."""
    config = SparseConfig(quantization="none")
    sight = inputs.visibility
    visible = sight.blocks(*config.block)[0, 0]
    rank = torch.rand(inputs.query.shape[1], *visible.shape, generator=generator)
    rank = torch.where(visible, rank, 2.0)
    if sight.right_bounded:
        rank = torch.where(sight.right_edge(*config.block), -1.0, rank)
    keep_count = ((1 - sparsity) * visible.sum(-1, keepdim=True)).round().clamp(min=1)
    dense = rank.argsort(-1).argsort(-1) < keep_count
    return BlockMask.from_dense(dense[None] & visible, sight.q_len, sight.k_len, config.block, visible)


def worst_error(inputs: Inputs, mask: BlockMask, values: Tensor) -> float:
    """Largest difference from float64 attention over the mask, on sampled query blocks of every head."""
    dense, worst = mask.to_dense()[0], 0.0
    rows_per_block, keys_per_block = mask.block
    for head in range(inputs.query.shape[1]):
        for i in {0, mask.q_blocks // 3, mask.q_blocks - 1}:
            rows = range(i * rows_per_block, min((i + 1) * rows_per_block, mask.q_len))
            seen = inputs.visibility.pairs(rows, range(mask.k_len))[0, 0]
            seen &= dense[head, i].repeat_interleave(keys_per_block)[: mask.k_len]
            query, key, value = (
                inputs.query[0, head].double(),
                inputs.key[0, head].double(),
                inputs.value[0, head].double(),
            )
            scores = query[rows.start : rows.stop] @ key.T * inputs.scale
            exact = torch.where(seen, scores, -torch.inf).softmax(-1) @ value
            worst = max(worst, float((values[0, head, rows.start : rows.stop] - exact).abs().max()))
    return worst


def median_seconds(*actions: Callable[[], object], repeats: int = 3) -> list[float]:
    """Median time of each action; the actions take turns, so that drift of the machine meets all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[repeats // 2] for taken in times]


def extra_memory(action: Callable[[], Tensor], inputs: Inputs) -> float:
    """Peak resident memory beyond the inputs and the output, as a share of Q + K + V + O. Linux only."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return float("nan")

    def kilobytes(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    ctypes.CDLL(None).malloc_trim(0)  # memory kept from earlier runs would hide this run's
    clear.write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    output = action()
    output_bytes = output.numel() * output.element_size()
    io_bytes = sum(x.numel() * x.element_size() for x in (inputs.query, inputs.key, inputs.value)) + output_bytes
    return max(0.0, (kilobytes("VmHWM") - before) * 1024 - output_bytes) / io_bytes


def measure(tokens: int, head_dim: int, causal: bool, sparsity: float) -> Row:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, tokens, head_dim, generator=generator).unbind(0)
    inputs = prepare_inputs(query, key, value, is_causal=causal)
    backend, config = CpuBackend(), SparseConfig(quantization="none")
    mask = random_mask(inputs, sparsity, generator)

    def predict() -> None:
        backend.select(backend.summarize(inputs, config), config)

    def sparse() -> Tensor:
        blocks = backend.summarize(inputs, config)
        backend.select(blocks, config)
        return backend.attend(blocks, mask, config).values

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    error = worst_error(inputs, mask, sparse())
    if not error <= MAX_ERROR:
        raise SystemExit(f"wrong result: error {error} at {tokens} tokens; no speed is printed for it")
    dense_seconds, sparse_seconds, predict_seconds = median_seconds(dense, sparse, predict)
    return Row(
        tokens, head_dim, causal, sparsity, dense_seconds, sparse_seconds, predict_seconds,
        dense_seconds / sparse_seconds, BARS.get((causal, sparsity), 0.0), error, extra_memory(sparse, inputs),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    lengths, dims = ((2048,), (64,)) if options.quick else ((8192, 16384), (64, 128))
    cases = [(n, d, causal, s) for n in lengths for d in dims for causal in (False, True) for s in (0.0, 0.6, 0.8)]
    print(" tokens  dim  causal  sparsity   dense s  sparge s  predict s  speed-up   bar  max error  extra memory")
    rows = []
    for case in cases:
        row = measure(*case)
        rows.append(row)
        print(
            f"{row.tokens:7d} {row.head_dim:4d}  {row.causal!s:6}  {row.sparsity:8.0%}  {row.dense_seconds:8.3f}  "
            f"{row.sparse_seconds:8.3f}  {row.predict_seconds:9.4f}  {row.speedup:7.2f}x  {row.bar:4.1f}  "
            f"{row.max_error:.2e}  {row.extra_memory:11.1%}",
            flush=True,
        )
    if options.json:
        hardware = {"cpu": platform.processor() or platform.machine(), "isa": torch.backends.cpu.get_cpu_capability()}
        versions = {name: metadata.version(name) for name in ("torch", "llvmlite")} | {"sparge": sparge.__version__}
        facts = {**hardware, "threads": torch.get_num_threads(), "heads": HEADS, "dtype": "float32", **versions}
        options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
