"""What SparseConfig(max_error=...) costs when no head is over it: more than the same call without, in shares of dense.

    python benchmarks/error_budget.py --json benchmarks/results/gpu_h200_error_budget.json

Random normal inputs, 60 % of the blocks skipped, a budget that nothing exceeds. Every result is checked before it is
timed: no head is redone, the output is that without a budget, and the estimate is near the error of sampled rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge.bench.machine import hardware, versions
from sparge.bench.timing import Timed, medians

SKIPPING = sparge.SparseConfig(rule="topk", topk=0.4, subblocks=(1, 4))
NEVER_EXCEEDED = 10.0
TURNS = 5
SIZES = {"cuda": (32, 32768, 128), "cpu": (4, 4096, 64)}  # heads, tokens, channels
Row = dict[str, Any]


def checked(query: Tensor, key: Tensor, value: Tensor, causal: bool, config: sparge.SparseConfig) -> None:
    """Raises if the budget changes anything but the statistics."""
    strict = replace(config, max_error=NEVER_EXCEEDED)
    want = sparge.attention(query, key, value, is_causal=causal, config=config)
    got, stats = sparge.attention(query, key, value, is_causal=causal, config=strict, return_stats=True)
    if bool(stats.redone.any()) or not torch.equal(got, want):
        raise RuntimeError("a budget that nothing exceeds has changed the result.")
    if not bool(((stats.error > 0) & (stats.error < NEVER_EXCEEDED)).all()):
        raise RuntimeError(f"the estimated errors, up to {stats.error.max().item()}, are none.")


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay  # type: ignore[no-any-return]


def milliseconds(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Medians of several turns, so that a busy moment or a lower clock meets them all."""
    turns = [medians({name: Timed(call) for name, call in calls.items()}, device) for _ in range(TURNS)]
    failed = [taken for turn in turns for taken in turn.values() if isinstance(taken, str)]
    if failed:
        raise RuntimeError(failed[0])
    return {name: median(float(turn[name]) for turn in turns) for name in calls}


@torch.inference_mode()
def measure(device: torch.device, heads: int, tokens: int, dim: int, causal: bool) -> Row:
    on_gpu = device.type == "cuda"
    dtype, config = (torch.bfloat16, "int8-fp8") if on_gpu else (torch.float32, "none")
    plain = replace(SKIPPING, quantization=config)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, dim, device=device, dtype=dtype, generator=generator) for _ in range(3))
    checked(q, k, v, causal, plain)

    def dense() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if on_gpu else SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    ways = {"plain": plain, "budget": replace(plain, max_error=NEVER_EXCEEDED)}
    calls: dict[str, Callable[[], object]] = {"dense": dense}
    for name, way in ways.items():
        calls[name] = lambda way=way: sparge.attention(q, k, v, is_causal=causal, config=way)
    if on_gpu:
        calls |= {f"{name}, graph": graphed(calls[name]) for name in ways}
    taken = milliseconds(calls, device)
    row = {"heads": heads, "tokens": tokens, "head_dim": dim, "causal": causal, "milliseconds": taken}
    for kind in ("", ", graph") if on_gpu else ("",):
        row["cost" + kind] = (taken["budget" + kind] - taken["plain" + kind]) / taken["dense"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=tuple(SIZES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows = []
    for causal in (False, True):
        rows.append(measure(device, *SIZES[options.device], causal))
        print(rows[-1], flush=True)
    if options.json is not None:
        found = {"machine": hardware(device), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
