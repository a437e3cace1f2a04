"""Hopper's kernel compiles without a GPU: tensor-core instructions, nothing serialised, no spills where it counts."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

import aot

from sparge import SparseConfig
from sparge.backends.hopper import launch
from sparge.inputs import Inputs, pack_inputs, prepare_inputs
from sparge.packing import Packing

ARCH = 90


def compiled(
    monkeypatch, block, dim: int, is_causal: bool, needs_lse: bool, padded: bool = False,
    quantization: str = "int8-fp8", dtype: torch.dtype = torch.bfloat16, pv_threshold: float | None = None,
) -> aot.Resources:  # fmt: skip
    query, key, value = (torch.empty(1, 2, 1000, dim, dtype=dtype) for _ in range(3))
    padding = torch.ones(1, 1, 1, 1000, dtype=torch.bool) if padded else None
    inputs = prepare_inputs(query, key, value, padding, is_causal=is_causal, needs_lse=needs_lse)
    return compiled_for(
        monkeypatch, inputs, SparseConfig(quantization=quantization, block=block, pv_threshold=pv_threshold)
    )


def compiled_for(monkeypatch, inputs: Inputs, config: SparseConfig) -> aot.Resources:
    monkeypatch.setattr(launch, "capability", lambda device: ARCH)
    monkeypatch.setattr("sparge.backends.triton.launch.capability", lambda device: ARCH)
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    backend, noted = launch.HopperBackend(), []
    with aot.recorded_launches(noted):
        blocks = backend.summarize(inputs, config)
        backend.attend(blocks, backend.select(blocks, config), config)
    # With 16-bit values the portable kernel is launched last, for values that are not finite.
    kernel, args, kwargs = noted[-1 if config.quantization == "int8-fp8" else -2]
    assert kernel.__name__ == "attend"
    assert "hopper" in kernel.__module__
    return aot.compile_kernel(kernel, args, kwargs, ARCH)


@pytest.mark.parametrize(
    ("block", "dim", "is_causal", "needs_lse"),
    [((128, 64), 128, True, False), ((128, 64), 64, False, True), ((192, 64), 64, True, False),
     ((192, 64), 128, True, False), ((256, 128), 96, False, False), ((128, 64), 256, True, False)],
    ids=str,
)  # fmt: skip
def test_the_kernel_compiles_and_fits(monkeypatch, block, dim, is_causal, needs_lse):
    resources = compiled(monkeypatch, block, dim, is_causal, needs_lse)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    # Each consumer has a short loop for steps that every row sees whole, and a long one for the few that mask.
    spills, consumers = resources.spills_in_loops("IGMMA", "QGMMA"), 3 if block[0] % 192 == 0 else 2
    assert len(spills) >= 2 * consumers
    assert spills[:consumers] == [0] * consumers
    assert "s32.s8.s8" in resources.ptx
    assert "f32.e4m3.e4m3" in resources.ptx
    assert "cp.async.bulk.tensor" in resources.ptx
    assert not resources.serialized


def test_the_kernel_compiles_for_packed_sequences(monkeypatch):
    ends = torch.tensor([0, 300, 1000], dtype=torch.int32)
    query, key, value = (torch.empty(1000, 2, 128, dtype=torch.bfloat16) for _ in range(3))
    inputs = pack_inputs(query, key, value, Packing(ends, ends), (700, 700), True, None, None, False)
    resources = compiled_for(monkeypatch, inputs, SparseConfig(quantization="int8-fp8"))
    assert resources.spills_in_loops("IGMMA", "QGMMA")[:2] == [0, 0]
    assert not resources.serialized


@pytest.mark.parametrize(
    ("block", "quantization"), [((128, 64), "int8-fp8"), ((192, 64), "int8-fp8"), ((128, 64), "int8")]
)
def test_the_kernel_compiles_with_the_second_stage(monkeypatch, block, quantization):
    resources = compiled(monkeypatch, block, 128, True, False, quantization=quantization, pv_threshold=-4.0)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert not resources.serialized


def test_the_kernel_compiles_with_padding(monkeypatch):
    assert not compiled(monkeypatch, (128, 64), 128, False, False, padded=True).serialized


@pytest.mark.parametrize(("version", "refusal"), [("3.6.0", None), ("3.9.1", None), ("3.5.1", "3.5"), ("4.0.0", "4.0")])
def test_a_triton_that_the_kernel_was_not_tried_with_is_refused(monkeypatch, version, refusal):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.importlib.metadata, "version", lambda name: version)
    launch._release.cache_clear()
    said = launch.HopperBackend().unavailable()
    launch._release.cache_clear()
    assert said is None if refusal is None else refusal in said


@pytest.mark.parametrize("quantization", ["int8", "none"])
@pytest.mark.parametrize(
    ("block", "dim", "is_causal", "needs_lse", "dtype"),
    [((128, 64), 128, True, False, torch.bfloat16), ((128, 64), 64, False, True, torch.float16),
     ((256, 128), 96, False, False, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_the_kernel_for_16_bit_values_compiles_and_fits(
    monkeypatch, quantization, block, dim, is_causal, needs_lse, dtype
):
    resources = compiled(monkeypatch, block, dim, is_causal, needs_lse, quantization=quantization, dtype=dtype)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    scores = "s32.s8.s8" if quantization == "int8" else f"f32.{name}.{name}"
    spills = resources.spills_in_loops("IGMMA" if quantization == "int8" else "HGMMA", "HGMMA")
    assert len(spills) >= 4
    assert spills[:2] == [0, 0]
    assert f"m64n128k{32 if quantization == 'int8' else 16}.{scores}" in resources.ptx
    assert f"f32.{name}.{name}" in resources.ptx
    assert not resources.serialized
