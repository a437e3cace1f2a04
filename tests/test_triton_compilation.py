"""Every Triton kernel compiles for every architecture without a GPU: shared memory within the chip's, no spills."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import aot

from sparge import SparseConfig
from sparge.backends.triton import launch
from sparge.inputs import prepare_inputs

MAX_SPILL = 16  # bytes
FP8_SINCE = 89
TENSOR_CORE = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05", 120: "mma.sync"}


def launches(monkeypatch, arch: int, quantization: str, dim: int, pv_threshold: float | None):
    monkeypatch.setattr(launch, "capability", lambda device: arch)
    query, key, value = (torch.empty(1, 2, 1000, dim, dtype=torch.bfloat16) for _ in range(3))
    inputs = prepare_inputs(query, key, value, is_causal=True)
    config = SparseConfig(quantization=quantization, pv_threshold=pv_threshold)
    backend, noted = launch.TritonBackend(), []
    with aot.recorded_launches(noted):
        blocks = backend.summarize(inputs, config)
        backend.attend(blocks, backend.select(blocks, config), config)
    return noted


@pytest.mark.parametrize("arch", sorted(aot.SHARED_MEMORY_LIMIT))
@pytest.mark.parametrize("quantization", ["none", "int8", "int8-fp8"])
def test_kernels_compile_and_fit(monkeypatch, arch, quantization):
    if quantization == "int8-fp8" and arch < FP8_SINCE:
        pytest.skip("no fp8 on this architecture")
    noted = launches(monkeypatch, arch, quantization, 128, None)
    names = {kernel.__name__ for kernel, _, _ in noted}
    assert names >= {"key_sums", "key_mean", "prepare_keys", "prepare_queries", "select", "expand", "attend"}
    for kernel, args, kwargs in noted:
        if kwargs.get("CAREFUL"):
            continue  # runs only where values are not finite
        built = aot.compile_kernel(kernel, args, kwargs, arch)
        assert built.shared_bytes <= aot.SHARED_MEMORY_LIMIT[arch] * 1024, (built.kernel, built.shared_bytes)
        assert built.spill_bytes <= MAX_SPILL, (built.kernel, built.spill_bytes)
        if built.kernel == "attend" and quantization == "none":
            assert TENSOR_CORE[arch] in built.ptx
