"""Every Triton kernel compiles for every architecture without a GPU, fits its shared memory, and spills in no loop."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import aot
from problems import EXACT

from sparge import SparseConfig
from sparge.backends.triton import launch, plans, sizes
from sparge.config import RULES
from sparge.inputs import Inputs, pack_inputs, prepare_inputs
from sparge.packing import Packing
from sparge.stages import Output, Redo

MAX_SPILL = 112  # bytes, around the loops, with the options that Triton 3.9 gives to the assembler
FP8_SINCE = 89
ARCHITECTURES = sorted(aot.SHARED_MEMORY_LIMIT)
TENSOR_CORE = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05", 120: "mma.sync"}


def a_problem(dim: int, packed: bool) -> Inputs:
    query, key, value = (torch.empty(1, 2, 1000, dim, dtype=torch.bfloat16) for _ in range(3))
    if not packed:
        return prepare_inputs(query, key, value, is_causal=True)
    packing = Packing(torch.tensor([0, 400, 1000]), torch.tensor([0, 400, 1000]))
    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    return pack_inputs(*tokens, packing, (600, 600), is_causal=True, scale=None, window=None, needs_lse=True)


def spills_little(resources: aot.Resources) -> bool:
    """And nothing in a loop that multiplies."""
    spilled = resources.spill_bytes
    return spilled == 0 or (spilled <= MAX_SPILL and not any(resources.spills_in_loops("MMA")))


def compile_all(
    monkeypatch, arch: int, config: SparseConfig, dim: int, packed: bool = False, only: str = ""
) -> list[aot.Resources]:
    """Compiles what a call launches; the plain kernels must fit the chip."""
    monkeypatch.setattr(launch, "capability", lambda device: arch)
    backend, noted = launch.TritonBackend(), []
    with aot.recorded_launches(noted):
        blocks = backend.summarize(a_problem(dim, packed), config)
        backend.attend(blocks, backend.select(blocks, config), config)
    names = [kernel.__name__ for kernel, _, _ in noted]
    expected = ["prepare"] * (5 if config.quantization == "int8-fp8" else 4)
    expected += ["probe"] * ("probe" in config.rule) + ["select", "expand", "attend"]
    assert names[: len(expected)] == expected
    built = []
    for kernel, args, kwargs in noted:
        if kwargs.get("CAREFUL") or (only and kernel.__name__ != only):
            continue  # CAREFUL runs only where values are not finite
        resources = aot.compile_kernel(kernel, args, kwargs, arch)
        assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[arch] * 1024, resources
        assert spills_little(resources), resources
        built.append(resources)
    return built


def best_format(arch: int) -> str:
    return "int8-fp8" if arch >= FP8_SINCE else "int8"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_and_fit(monkeypatch, arch):
    built = compile_all(monkeypatch, arch, SparseConfig(quantization=best_format(arch)), 128)
    assert sum(resources.ptx.count(TENSOR_CORE[arch]) for resources in built)


@pytest.mark.every_format
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_other_formats_compile_and_fit(monkeypatch, arch, quantization):
    if quantization == best_format(arch):
        pytest.skip("compiled above")
    compile_all(monkeypatch, arch, SparseConfig(quantization=quantization), 128)


@pytest.mark.every_format
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 256])
def test_other_head_dims_compile_and_fit(monkeypatch, arch, dim):
    compile_all(monkeypatch, arch, SparseConfig(quantization=best_format(arch)), dim)


@pytest.mark.every_format
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_rarer_settings_compile_and_fit(monkeypatch, arch):
    config = SparseConfig(
        rule=("cdf", "topk"), similarity=0.1, pv_threshold=-3.0, protected=((0, 5),), quantization=best_format(arch)
    )
    compile_all(monkeypatch, arch, config, 64)


@pytest.mark.every_format
@pytest.mark.parametrize("arch", [86, 90])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("subblocks", [4, 8])
def test_selection_fits_with_every_rule(monkeypatch, arch, dim, subblocks):
    config = SparseConfig(rule=RULES, subblocks=(4, subblocks), quantization="none")
    compile_all(monkeypatch, arch, config, dim, only="select")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_probe_compiles_and_fits(monkeypatch, arch, dim, quantization):
    config = SparseConfig(rule="probe", quantization=quantization)
    (built,) = compile_all(monkeypatch, arch, config, dim, only="probe")
    instructions = (TENSOR_CORE[arch], "mma.sync") if arch == 100 else (TENSOR_CORE[arch],)  # by Triton's release
    assert any(name in built.ptx for name in instructions)


@pytest.mark.parametrize(("arch", "block"), [(80, (64, 32)), (120, (64, 32)), (89, (256, 128)), (90, (256, 128))])
def test_the_probe_of_other_blocks_compiles_and_fits(monkeypatch, arch, block):
    compile_all(monkeypatch, arch, SparseConfig(rule="probe", quantization="int8", block=block), 64, only="probe")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("quantization", ["none", "int8-fp8"])
def test_the_probe_of_many_rows_compiles_and_fits(monkeypatch, dim, quantization):
    monkeypatch.setattr(plans, "probe_sizes", lambda *known: sizes.probe_sizes(*known[:-1], 1 << 20))
    config = SparseConfig(rule="probe", quantization=quantization)
    (built,) = compile_all(monkeypatch, 90, config, dim, only="probe")
    assert TENSOR_CORE[90] in built.ptx


@pytest.mark.parametrize(("arch", "dim"), [*((arch, 128) for arch in ARCHITECTURES), (90, 64), (90, 256), (86, 256)])
def test_the_error_budget_compiles_and_fits(monkeypatch, arch, dim):
    monkeypatch.setattr(launch, "capability", lambda device: arch)
    backend, config, inputs, noted = launch.TritonBackend(), EXACT, a_problem(dim, packed=False), []
    output = Output(inputs.empty_output(), torch.empty(1, 2, 1000), torch.zeros(1, 2))
    with aot.recorded_launches(noted):
        rows = torch.arange(0, 1000, 9)
        backend.judge(output.values, backend.exact_rows(inputs, rows), rows, 0.1)
        blocks = backend.summarize(inputs, config)
        del noted[3:]
        backend.attend_again(blocks, config, Redo(torch.ones(1, 2).bool(), output))
    assert noted.pop()[2]["CAREFUL"]
    assert [kernel.__name__ for kernel, _, _ in noted] == ["attend_rows", "merge_parts", "judge", "expand", "attend"]
    built = [aot.compile_kernel(*launched, arch) for launched in noted]
    assert all(resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[arch] * 1024 for resources in built), built
    assert all(spills_little(resources) for resources in built[:-1]), built  # of the last, as above
    assert TENSOR_CORE[arch] in built[0].ptx


@pytest.mark.every_format
@pytest.mark.parametrize("arch", [86, 90])
def test_packed_kernels_compile_and_fit(monkeypatch, arch):
    compile_all(monkeypatch, arch, SparseConfig(quantization=best_format(arch)), 128, packed=True)
