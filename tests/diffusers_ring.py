"""One of two processes in a ring by diffusers' context parallelism; run by test_diffusers_backend."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import sys
from dataclasses import replace
from typing import Any

import torch
from diffusers import ContextParallelConfig
from problems import refused
from small_diffusers import SMALL, output
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge.distributed import run
from sparge.integrations.diffusers import backend
from sparge.integrations.layers import LayerSettings

EXACT = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none")
FEW = sparge.SparseConfig(rule="topk", topk=0.1, block=(64, 32), sinks=0, quantization="none")


def by_name(config: sparge.SparseConfig) -> None:
    """The settings that the name stands for."""
    backend.DEFAULT = replace(backend.DEFAULT, settings=LayerSettings(config))


def results(rank: int, shared: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{shared}", rank=rank, world_size=2)
    one = SMALL["wan"]
    model, patched = one.built(), one.built()
    want = output(model, **one.inputs)
    model.set_attention_backend("sparge")
    by_name(FEW)
    want_sparse = output(model, **one.inputs)
    counted: list[Any] = []
    attend_ring = run.attend_ring
    run.attend_ring = lambda *x: counted.append(1) or attend_ring(*x)  # type: ignore[func-returns-value]

    torch.accelerator.device_count = lambda: 2  # type: ignore[assignment] # diffusers asks which accelerator is its own
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=2, mesh=mesh))
    sparse = output(model, **one.inputs)
    by_name(EXACT)
    exact = output(model, **one.inputs)
    torch.testing.assert_close(exact, want, atol=2e-5, rtol=1e-4)
    print("exact")
    torch.testing.assert_close(sparse, want_sparse, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(sparse, want, atol=1e-3)
    print("sparse as in one process")

    patched.enable_parallelism(config=ContextParallelConfig(ring_degree=2, mesh=mesh))
    with sparge.patch(patched, FEW), refused(ValueError, "patched", "ring_degree", "ulysses_degree"):
        output(patched, **one.inputs)
    print("a patch is refused")
    print(f"{len(counted)} calls in a ring")
    distributed.destroy_process_group()


if __name__ == "__main__":
    results(int(sys.argv[2]), sys.argv[1])
