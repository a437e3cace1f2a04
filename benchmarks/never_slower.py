"""Is sparge.attention ever slower than the best dense attention? Default settings, inputs of which nothing is skipped.

    python benchmarks/never_slower.py --json benchmarks/results/gpu_h200_never_slower.json

Random normal inputs are the worst case: the default rule keeps every block, so whatever prediction costs is lost. A
call passes if it takes at most 1.03x the time of the best of torch's dense kernels (1.06x where prediction had to run
to find that nothing can be skipped), or 20 microseconds more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge.bench.machine import hardware, versions

ALLOWED_RATIO, ALLOWED_RATIO_PREDICTED, ALLOWED_MICROSECONDS = 1.03, 1.06, 20
GPU_TURNS, CPU_TURNS = 5, 16
CPU_SECONDS = 1.0  # of a case, at least
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
GPU_SHAPES = ((128, False, 32, 32), (128, True, 32, 8), (64, True, 32, 32), (256, False, 8, 8))
GPU_TOKENS = (1, 128, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 16384, 32768, 131072)
CPU_SHAPES = ((64, False, 8, 8), (64, True, 8, 2), (128, True, 4, 4))
CPU_TOKENS = (1, 64, 256, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
Row = dict[str, Any]


def cases(device: str) -> Iterator[tuple[int, bool, int, int, int]]:
    """head_dim, causal, query heads, key/value heads, tokens."""
    shapes, lengths = (GPU_SHAPES, GPU_TOKENS) if device == "cuda" else (CPU_SHAPES, CPU_TOKENS)
    for (dim, causal, heads, kv_heads), tokens in product(shapes, lengths):
        if tokens <= 32768 or (dim == 128 and causal):
            yield dim, causal, heads, kv_heads, tokens


def milliseconds(device: str, calls: list[Callable[[], object]]) -> list[float]:
    """The median time of each call; they take turns, so that a busy moment or a lower clock meets them all."""
    times: list[list[float]] = [[] for _ in calls]
    if device == "cuda":
        from triton.testing import do_bench

        for call in calls:
            call()
        for _ in range(GPU_TURNS):
            for call, taken in zip(calls, times, strict=True):
                taken.append(do_bench(call, warmup=3, rep=10, return_mode="median"))
        return [median(taken) for taken in times]
    pairs, began, turn = list(zip(calls, times, strict=True)), time.perf_counter(), 0
    while turn < CPU_TURNS or time.perf_counter() - began < CPU_SECONDS:
        for call, taken in pairs if turn % 2 else pairs[::-1]:
            start = time.perf_counter()
            call()
            if turn > 0:
                taken.append(1e3 * (time.perf_counter() - start))
        turn += 1
    return [median(taken) for taken in times]


def dense_calls(device: str, attend: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """Torch's own choice, or on a GPU each of its fast kernels that takes the call."""
    if device == "cpu":
        return {"sdpa": attend}

    def by(kernel: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(kernel):
                return attend()

        return call

    taken = {}
    for name, kernel in DENSE.items():
        try:
            by(kernel)()
        except RuntimeError:  # this kernel does not take such a call
            continue
        taken[name] = by(kernel)
    return taken


@torch.inference_mode()
def measure(device: str, dim: int, causal: bool, heads: int, kv_heads: int, tokens: int) -> Row:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, h, tokens, dim, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    how = {"is_causal": causal, "enable_gqa": heads != kv_heads}
    dense = dense_calls(device, lambda: scaled_dot_product_attention(q, k, v, **how))
    _, stats = sparge.attention(q, k, v, **how, return_stats=True)
    *others, ours = milliseconds(device, [*dense.values(), lambda: sparge.attention(q, k, v, **how)])
    best = min(others)
    return {
        "head_dim": dim, "causal": causal, "heads": heads, "kv_heads": kv_heads, "tokens": tokens,
        "dense_ms": {name: round(ms, 4) for name, ms in zip(dense, others, strict=True)}, "sparge_ms": round(ours, 4),
        "ratio": round(ours / best, 3), "extra_us": round(1e3 * (ours - best)), "backend": stats.backend,
        "executed": round((stats.executed.sum() / stats.visible.sum()).item(), 3),
    }  # fmt: skip


def passes(row: Row) -> bool:
    ratio = ALLOWED_RATIO if row["backend"] == "dense" else ALLOWED_RATIO_PREDICTED
    return bool(row["ratio"] <= ratio or row["extra_us"] <= ALLOWED_MICROSECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--longest", type=int, default=1 << 20, help="leave longer sequences out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for case in cases(options.device):
        if case[-1] <= options.longest:
            rows.append(measure(options.device, *case))
            print(rows[-1], "" if passes(rows[-1]) else "SLOWER", flush=True)
    print(f"{sum(map(passes, rows))} of {len(rows)} pass")
    if options.json is not None:
        found = {"machine": hardware(torch.device(options.device)), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
