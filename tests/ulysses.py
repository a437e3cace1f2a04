"""One of two processes that share a model's tokens by diffusers' context parallelism; run by test_diffusers_backend."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import sys
from typing import Any

import torch
from diffusers import ContextParallelConfig
from small_diffusers import SMALL, output
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge.integrations.diffusers import backend

EXACT = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none")
PER_HEAD = sparge.SparseConfig(rule="topk", topk=(0.1, 0.3), block=(64, 32), sinks=0, quantization="none")


def results(rank: int, shared: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{shared}", rank=rank, world_size=2)
    one = SMALL["flux"]
    inputs = {**one.inputs, "encoder_hidden_states": torch.ones(2, 8, 16).cumsum(1), "txt_ids": torch.zeros(8, 3)}
    model = one.built()
    want = output(model, **inputs)
    with sparge.patch(model, PER_HEAD):
        want_sparse = output(model, **inputs)
    counted: list[Any] = []
    backend.attention = lambda *x, **more: counted.append(1) or sparge.attention(*x, **more)  # type: ignore[attr-defined]

    torch.accelerator.device_count = lambda: 2  # type: ignore[assignment] # diffusers asks which accelerator is its own
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    with sparge.patch(model, EXACT):
        exact = output(model, **inputs)
    with sparge.patch(model, PER_HEAD):
        sparse = output(model, **inputs)
    torch.testing.assert_close(exact, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sparse, want_sparse, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(sparse, want, atol=1e-3)
    print(f"exact\nsparse as in one process\n{len(counted)} calls by sparge")
    distributed.destroy_process_group()


if __name__ == "__main__":
    results(int(sys.argv[2]), sys.argv[1])
