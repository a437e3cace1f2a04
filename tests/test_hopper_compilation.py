"""Hopper's kernel compiles without a GPU: tensor-core instructions, nothing serialised, no spills where it counts."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

import aot
import triton
from problems import EXACT

from sparge import BlockMask, SparseConfig
from sparge.backends.hopper import launch, launch_prepare, launch_probe, launch_select
from sparge.backends.hopper.boxes import descriptor
from sparge.backends.triton import dispatch, plans
from sparge.backends.triton.launch import TritonBackend
from sparge.inputs import Inputs, pack_inputs, prepare_inputs
from sparge.packing import Packing
from sparge.stages import Output, Redo

ARCH = 90
DEFAULT = SparseConfig()


def call_of(
    block, dim: int, is_causal: bool, needs_lse: bool, padded: bool = False,
    quantization: str = "int8-fp8", dtype: torch.dtype = torch.bfloat16, pv_threshold: float | None = None,
    tokens: int = 1000,
) -> tuple[Inputs, SparseConfig]:  # fmt: skip
    query, key, value = (torch.empty(1, 2, tokens, dim, dtype=dtype) for _ in range(3))
    padding = torch.ones(1, 1, 1, tokens, dtype=torch.bool) if padded else None
    inputs = prepare_inputs(query, key, value, padding, is_causal=is_causal, needs_lse=needs_lse)
    return inputs, SparseConfig(quantization=quantization, block=block, pv_threshold=pv_threshold)


def compiled(monkeypatch, *args, **kwargs) -> aot.Resources:
    return compiled_for(monkeypatch, *call_of(*args, **kwargs))


def pose_as_hopper(monkeypatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda device: ARCH)
    monkeypatch.setattr("sparge.backends.triton.launch.capability", lambda device: ARCH)
    monkeypatch.setattr(launch, "_processors", lambda device: 132)


def attend_launch(monkeypatch, inputs: Inputs, config: SparseConfig):
    """The kernel, its arguments and its constants."""
    pose_as_hopper(monkeypatch)
    backend, noted = launch.HopperBackend(), []
    with aot.recorded_launches(noted):
        blocks = backend.summarize(inputs, config)
        backend.attend(blocks, backend.select(blocks, config), config)
    # With 16-bit values the portable kernel is launched last, for values that are not finite.
    kernel, args, kwargs = noted[-1 if config.quantization == "int8-fp8" else -2]
    assert kernel.__name__ == "attend"
    assert "hopper" in kernel.__module__
    return kernel, args, kwargs


def spills_in_few(spills: list[int], block: tuple[int, int], dim: int, needs_lse: bool) -> bool:
    """Spills by loop, the shortest first: none in whole steps, and the tail.

    Those that need no exact sums are the longest: they may move the rows' best, and make numbers in three ways. With
    Triton 3.9 ways that are rarely taken put a number aside, and every way with blocks of 256 rows. Steps that mask, a
    few a tile, may read some. Beside three consumers of 128 channels the tail, a step a tile, may read one; it is
    longer than whole steps.
    """
    consumers = 3 if block[0] % 192 == 0 else 2
    if not needs_lse and (consumers == 2 or dim <= 64):
        return sum(spills[consumers:]) <= (6 if newest() else 0)
    return not any(spills[:consumers]) and max(spills[consumers:-consumers], default=0) <= (1 if consumers == 3 else 0)


def newest() -> bool:
    return triton.__version__.startswith("3.9")


def compiled_for(monkeypatch, inputs: Inputs, config: SparseConfig) -> aot.Resources:
    return aot.compile_kernel(*attend_launch(monkeypatch, inputs, config), ARCH)


SHORT, LONG = min(launch.WIDE_FROM.values()) - 1, max(launch.WIDE_FROM.values())


@pytest.mark.parametrize(
    ("block", "dim", "is_causal", "needs_lse", "tokens"),
    [((128, 64), 128, True, False, SHORT), ((128, 64), 64, False, True, SHORT), ((192, 64), 64, True, False, LONG),
     ((192, 64), 128, True, False, LONG), ((256, 128), 96, False, False, LONG), ((128, 64), 256, True, False, LONG),
     ((128, 64), 128, True, False, LONG), ((128, 64), 128, False, True, LONG), ((128, 64), 64, False, True, LONG),
     ((256, 128), 160, True, False, LONG), ((128, 128), 128, False, False, SHORT)],
    ids=str,
)  # fmt: skip
def test_the_kernel_compiles_and_fits(monkeypatch, block, dim, is_causal, needs_lse, tokens):
    resources = compiled(monkeypatch, block, dim, is_causal, needs_lse, tokens=tokens)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    # Each consumer has a loop for whole steps, a short one for the tail, and a long one for the few steps that mask.
    spills, consumers = resources.spills_in_loops("IGMMA", "QGMMA"), 3 if block[0] % 192 == 0 else 2
    loops = 3 if block[1] == 64 or (dim <= 128 and tokens == LONG) else 2  # blocks of 128 keys fill any narrow step
    assert len(spills) == loops * consumers
    assert spills_in_few(spills, block, dim, needs_lse)
    assert "s32.s8.s8" in resources.ptx
    assert "f32.e4m3.e4m3" in resources.ptx
    assert "cp.async.bulk.tensor" in resources.ptx
    assert not resources.serialized


@pytest.mark.parametrize(
    ("block", "dim", "needs_lse", "tokens", "pv_threshold", "units"),
    [((128, 64), 128, False, LONG, None, 4), ((128, 64), 128, False, SHORT, None, 2),
     ((128, 64), 64, True, LONG, None, 4), ((128, 64), 128, True, LONG, None, 2),
     ((256, 128), 96, False, LONG, None, 4), ((192, 64), 128, False, LONG, None, 2),
     ((128, 64), 256, False, LONG, None, 2), ((128, 64), 128, False, LONG, -4.0, 4)],
    ids=str,
)  # fmt: skip
def test_steps_are_wide_where_lists_are_long_and_registers_suffice(
    monkeypatch, block, dim, needs_lse, tokens, pv_threshold, units
):
    call = call_of(block, dim, False, needs_lse, tokens=tokens, pv_threshold=pv_threshold)
    assert attend_launch(monkeypatch, *call)[2]["UNITS"] == units


def call_of_two_dims(dim: int, value_dim: int, block=(128, 64), **config) -> tuple[Inputs, SparseConfig]:
    query, key, value = (torch.empty(1, 2, LONG, n, dtype=torch.bfloat16) for n in (dim, dim, value_dim))
    inputs = prepare_inputs(query, key, value, is_causal=True, needs_lse=False)
    return inputs, SparseConfig(quantization="int8-fp8", block=block, **config)


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (256, 64), (128, 256)], ids=str)
def test_values_of_another_width_fit(monkeypatch, dim, value_dim):
    """192 channels of keys and 128 of values are what latent attention has."""
    resources = compiled_for(monkeypatch, *call_of_two_dims(dim, value_dim))
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert not resources.serialized


@pytest.mark.parametrize("needs_lse", [False, True])
@pytest.mark.parametrize("second", [None, -4.0])
@pytest.mark.parametrize("block", [(128, 64), (192, 64), (256, 128)], ids=str)
def test_whatever_is_taken_fits(monkeypatch, block, second, needs_lse):
    pose_as_hopper(monkeypatch)
    monkeypatch.setattr(TritonBackend, "unsupported", lambda self, inputs, config: None)
    for dim, value_dim in itertools.product((40, 64, 96, 128, 160, 192, 256), repeat=2):
        inputs, config = call_of_two_dims(dim, value_dim, block, pv_threshold=second)
        problem = replace(inputs, needs_lse=needs_lse).signature
        refusal = launch.HopperBackend().unsupported(inputs, config)
        if refusal is not None:
            assert block[0] == 192
            assert max(dim, value_dim) > 128
            continue
        size, warpgroups = launch.Sizes.of(problem, block, True), launch._warpgroups(block[0])
        units = launch._units(problem, size, warpgroups)
        used = launch._shared_bytes(size, warpgroups, units, launch._stages(size, warpgroups, units))
        assert used <= launch.SHARED_BYTES


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "pieces"),
    [(512, 32768, 8, 4), (128, 131072, 1, 16), (2048, 32768, 17, 10), (32768, 32768, 1, 1), (8192, 8192, 32, 1),
     (4096, 4096, 32, 1), (33 * 128, 32768, 4, 1), (32768, 32768, 32, 1), (300, 300, 2, 1)],
    ids=str,
)  # fmt: skip
def test_the_last_tiles_are_divided_where_that_ends_sooner(queries, keys, heads, pieces):
    tiles = -(-queries // 128) * heads
    found = launch._pieces(tiles, 132, keys)
    assert found.count == pieces
    assert found.divided == (tiles % 132 if pieces > 1 else 0)
    assert found.tickets == tiles + found.divided * (pieces - 1)


UNDIVIDED = {
    "causal": ({"is_causal": True}, {}),
    "window": ({"window": (100, 100)}, {}),
    "second stage": ({}, {"pv_threshold": -4.0}),
    "160 channels": ({}, {}),
}


def long_call(queries: int, dim: int = 128, settings: dict | None = None, **config) -> tuple[Inputs, SparseConfig]:
    """So many queries of 65,536 keys."""
    query, key = (torch.empty(1, 1, n, dim, dtype=torch.bfloat16) for n in (queries, 65536))
    inputs = prepare_inputs(query, key, key, **{"needs_lse": False, **(settings or {})})
    return inputs, SparseConfig(quantization="int8-fp8", **config)


@pytest.mark.parametrize("case", UNDIVIDED)
def test_what_is_never_divided(monkeypatch, case):
    settings, config = UNDIVIDED[case]
    call = long_call(65536, 160 if "160" in case else 128, settings, **config)
    assert launch._pieces(512, 132, 65536).count > 1
    assert not attend_launch(monkeypatch, *call)[2]["DIVIDED"]


@pytest.mark.parametrize(
    ("block", "dim", "is_causal", "needs_lse"),
    [((128, 64), 128, False, False), ((128, 64), 64, False, True), ((192, 64), 128, True, False),
     ((256, 128), 96, True, False)],
    ids=str,
)  # fmt: skip
def test_the_kernel_that_divides_tiles_compiles_and_fits(monkeypatch, block, dim, is_causal, needs_lse):
    settings = {"is_causal": is_causal, "needs_lse": needs_lse}
    kernel, args, kwargs = attend_launch(monkeypatch, *long_call(512, dim, settings, block=block))
    assert kwargs["DIVIDED"]
    resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert spills_in_few(resources.spills_in_loops("IGMMA", "QGMMA"), block, dim, needs_lse)
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


@pytest.mark.parametrize(
    ("block", "dim", "needs_lse"), [((128, 64), 128, False), ((128, 64), 64, True), ((256, 128), 96, False)], ids=str
)
def test_the_second_stage_takes_wide_steps(monkeypatch, block, dim, needs_lse):
    resources = compiled(monkeypatch, block, dim, True, needs_lse, tokens=LONG, pv_threshold=-4.0)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    spills = resources.spills_in_loops("IGMMA", "QGMMA")  # of two consumers: the tail, steps that mask, wide ones
    assert len(spills) == 6
    # With Triton 3.9 two numbers are read again, but for the default's blocks of 128 channels.
    assert sum(spills[:2] + spills[4:]) <= (0 if dim == 128 else 6)
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


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_for_heads_anew_compiles_and_fits(monkeypatch, is_causal):
    pose_as_hopper(monkeypatch)
    query, key, value = (torch.empty(1, 2, 1000, 128, dtype=torch.bfloat16) for _ in range(3))
    inputs = prepare_inputs(query, key, value, is_causal=is_causal)
    output = Output(inputs.empty_output(), torch.empty(1, 2, 1000), torch.zeros(1, 2))
    backend, noted = launch.HopperBackend(), []
    with aot.recorded_launches(noted):
        blocks = backend.summarize(inputs, EXACT)
        backend.attend_again(blocks, EXACT, Redo(torch.ones(1, 2).bool(), output))
    kernel, args, kwargs = noted[-2]
    assert "hopper" in kernel.__module__
    assert kwargs["SOME_HEADS"]
    resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert resources.spills_in_loops("HGMMA")[:2] == [0, 0]
    assert not resources.serialized


def selection_launch(monkeypatch, inputs: Inputs, config: SparseConfig, name: str) -> tuple:
    pose_as_hopper(monkeypatch)
    backend, noted = launch.HopperBackend(), []
    with aot.recorded_launches(noted):
        backend.select(backend.summarize(inputs, config), config)
    (found,) = (launched for launched in noted if launched[0].__name__ == name)
    return found


def probe_launch(monkeypatch, inputs: Inputs, config: SparseConfig) -> tuple:
    return selection_launch(monkeypatch, inputs, config, "probe")


@pytest.mark.parametrize(
    ("quantization", "block", "dim", "is_causal", "probe_rows", "heads", "tokens", "warpgroups"),
    [("int8-fp8", (128, 64), 128, False, 4, 33, 32768, 4), ("none", (128, 64), 64, False, 4, 33, 32768, 4),
     ("int8", (128, 64), 128, True, 4, 66, 16384, 2), ("none", (192, 128), 128, False, 8, 80, 3000, 2),
     ("int8-fp8", (256, 128), 80, True, 1, 2, 3000, 1), ("none", (64, 64), 64, True, 4, 2, 3000, 1)],
    ids=str,
)  # fmt: skip
def test_the_probe_compiles_and_fits(
    monkeypatch, quantization, block, dim, is_causal, probe_rows, heads, tokens, warpgroups
):
    x = torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16)
    config = SparseConfig(quantization=quantization, block=block, rule="probe", probe_rows=probe_rows)
    kernel, args, kwargs = probe_launch(monkeypatch, prepare_inputs(x, x, x, is_causal=is_causal), config)
    assert "hopper" in kernel.__module__
    assert kwargs["WGS"] == warpgroups
    resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    # Triton rounds the warps of each partition up to four.
    assert resources.registers * (warpgroups + 1) * 128 <= 65536
    # Each consumer has a loop for steps that every row sees whole, and one for those that mask.
    plain = quantization == "none"
    spills = resources.spills_in_loops("HGMMA" if plain else "IGMMA")
    assert spills[:warpgroups] == [0] * warpgroups
    assert len(spills) == 2 * warpgroups
    # With Triton 3.9 one number is read again where bfloat16 scores of four warpgroups are masked.
    assert max(spills[warpgroups:]) <= (1 if plain and warpgroups == 4 else 0)
    # Outside of them, what a tile begins with may wait in memory.
    assert resources.spill_bytes <= {1: 0, 2: 0, 4: 480}[warpgroups]
    assert not resources.serialized
    assert ("m64n128k16.f32.bf16.bf16" if plain else "m64n128k32.s32.s8.s8") in resources.ptx
    assert "cp.async.bulk.tensor" in resources.ptx


@pytest.mark.parametrize(
    ("dim", "is_causal", "heads", "tokens", "warpgroups"),
    [(128, False, 33, 32768, 4), (64, False, 33, 32768, 4), (128, True, 33, 32768, 2), (96, False, 2, 3000, 1)],
    ids=str,
)
def test_the_probe_with_values_beside_it_compiles_and_fits(monkeypatch, dim, is_causal, heads, tokens, warpgroups):
    x = torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16)
    inputs = prepare_inputs(x, x, x, is_causal=is_causal, needs_lse=False)
    kernel, args, kwargs = probe_launch(monkeypatch, inputs, SparseConfig(quantization="int8-fp8"))
    assert kwargs["VALUES_TOO"]
    assert kwargs["WGS"] == warpgroups
    resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert resources.registers * (warpgroups + 1) * 128 <= 65536  # the two warps and the producer share four
    assert resources.spills_in_loops("IGMMA")[:warpgroups] == [0] * warpgroups
    # With Triton 3.8 one number is read again for each tile of 128 channels beside four warpgroups.
    assert resources.spills_among("E4M3") <= (1 if (warpgroups, dim) == (4, 128) else 0)
    assert "st.global.v4" in resources.ptx  # else the copies leave byte by byte


@pytest.mark.parametrize(
    ("dim", "is_causal", "heads", "tokens", "rule", "warpgroups"),
    [(128, False, 33, 32768, DEFAULT.rule, 4), (64, False, 33, 32768, ("threshold", "gap"), 4),
     (128, True, 33, 32768, DEFAULT.rule, 2), (96, False, 2, 3000, "gap", 1)],
    ids=str,
)  # fmt: skip
def test_selection_compiles_and_fits(monkeypatch, dim, is_causal, heads, tokens, rule, warpgroups):
    x = torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16)
    config = SparseConfig(quantization="int8-fp8", rule=rule)
    kernel, args, kwargs = selection_launch(monkeypatch, prepare_inputs(x, x, x, is_causal=is_causal), config, "select")
    assert "hopper" in kernel.__module__
    assert kwargs["WGS"] == warpgroups
    resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
    assert resources.shared_bytes <= aot.SHARED_MEMORY_LIMIT[ARCH] * 1024
    assert resources.registers * (warpgroups + 1) * 128 <= 65536
    # Both walks have a loop for steps that every row sees whole, and one for those that mask.
    spills = resources.spills_in_loops("HGMMA")
    assert len(spills) == 4 * warpgroups
    assert spills[: 2 * warpgroups] == [0] * (2 * warpgroups)
    assert not resources.serialized
    assert "m64n128k16.f32.bf16.bf16" in resources.ptx


WHOLE = torch.empty(1, 2, 300, 128, dtype=torch.bfloat16)
NOT_SELECTED = {
    "a search": ({"rule": "cdf", "cdf": 0.9}, {}),
    "sub-blocks": ({"subblocks": (4, 2)}, {}),
    "self-similarity": ({"similarity": 0.5}, {}),
    "protected": ({"protected": ((0, 10),)}, {}),
    "padding": ({}, {"attn_mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)}),
    "window": ({}, {"window": (100, 0)}),
}


@pytest.mark.parametrize("case", NOT_SELECTED)
def test_what_hopper_does_not_select_the_portable_kernel_does(monkeypatch, case):
    config, settings = SparseConfig(quantization="int8", **NOT_SELECTED[case][0]), NOT_SELECTED[case][1]
    inputs = prepare_inputs(WHOLE, WHOLE, WHOLE, **settings)
    assert not launch_select.takes(inputs.signature, config)
    assert "triton" in selection_launch(monkeypatch, inputs, config, "select")[0].__module__.split(".")


def test_values_that_no_probe_takes_along_are_prepared_all_the_same(monkeypatch):
    pose_as_hopper(monkeypatch)
    config, noted = SparseConfig(quantization="int8-fp8"), []
    inputs = prepare_inputs(WHOLE, WHOLE, WHOLE, needs_lse=False)
    mask = BlockMask.all_visible(inputs.visibility, config.block, 1, 2)
    backend = launch.HopperBackend()
    with aot.recorded_launches(noted):
        backend.attend(backend.summarize(inputs, config), mask, config)
    kinds = [kwargs.get("KIND") for _, _, kwargs in noted]
    assert kinds[: len(plans.KINDS)] == [
        plans.KINDS.index(x) for x in ("QUERIES", "SAMPLE", "KEYS", "VALUES", "REPAIR")
    ]
    noted.clear()
    with aot.recorded_launches(noted):
        blocks = backend.summarize(inputs, config)
        for _ in range(2):
            backend.select(blocks, replace(config, rule="gap"))
    assert [kwargs.get("KIND") for _, _, kwargs in noted].count(plans.KINDS.index("VALUES")) == 1


PLACES = {
    "default": ({}, {"needs_lse": False}),
    "default, with the LSE": ({}, {}),
    "causal": ({}, {"is_causal": True, "needs_lse": False}),
    "padding": ({}, {"attn_mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)}),
    "window": ({}, {"window": (100, 0), "needs_lse": False}),
    "second stage": ({"pv_threshold": -4.0}, {"needs_lse": False}),
    "self-similarity": ({"similarity": 0.5, "protected": ((0, 10),)}, {}),
    "a search": ({"rule": ("cdf", "topk"), "cdf": 0.9, "topk": 0.2}, {"needs_lse": False}),
    "int8": ({"quantization": "int8"}, {}),
    "16 bits": ({"quantization": "none"}, {"needs_lse": False}),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("backend", [launch.HopperBackend(), TritonBackend()], ids=lambda x: x.name)
def test_kernels_start_at_the_addresses_of_their_tensors(monkeypatch, backend, case):
    """Triton sees the tensors at a kernel's first launch alone, later launches are given addresses."""
    pose_as_hopper(monkeypatch)
    launches = []

    def compare(self, given, addresses):
        tensors = given() if callable(given) else given
        assert len(tensors) == len(addresses)
        for name, tensor, address in zip(self.kernel.arg_names, tensors, addresses, strict=False):
            if not isinstance(tensor, torch.Tensor):
                assert address is tensor  # a descriptor
            elif tensor.numel():
                assert address == tensor.data_ptr(), name
        launches.append(self)

    monkeypatch.setattr(dispatch.Launch, "__call__", compare)
    config = SparseConfig(**{"quantization": "int8-fp8", **PLACES[case][0]})
    inputs = prepare_inputs(WHOLE, WHOLE, WHOLE, **PLACES[case][1])
    blocks = backend.summarize(inputs, config)
    backend.attend(blocks, backend.select(blocks, config), config)
    assert len(launches) >= 6


def test_descriptors_are_passed_as_triton_passes_them_and_made_once(monkeypatch):
    """By the launcher of every release; one anew for each launch takes the host as long as the launch."""
    driver, launched, made = pytest.importorskip("triton.backends.nvidia.driver"), [], []

    def make(given, kind, *_):
        made.append(given)
        return [("made", kind["swizzle"], given.base.data_ptr()), *given.shape]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    monkeypatch.setattr(type(triton.runtime.driver), "active", None)  # asked for, and not used
    run = object.__new__(driver.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl, run.gsan_enabled = 1, False, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    if not triton.__version__.startswith("3.6."):
        run.arg_annotations, run.kernel_signature = "annotations", "signature"
    signature = {0: "*fp32", 1: "tensordesc<int8[64, 128]>", 2: "i32", 3: "tensordesc<int8[128, 64]>", 4: "i32"}
    kinds = [{"swizzle": 3}, {"swizzle": 2}]
    run.launch = driver.wrap_handle_tensordesc(lambda *args: launched.append(args), signature, kinds)
    expanding = dispatch._Expanding.of(run)
    copies = [torch.empty(2, 64, dtype=torch.int8) for _ in range(3)]
    for a, b in ((0, 1), (1, 0), (0, 1), (2, 2)):
        boxes = [descriptor(copies[n], (2, 64), (64, 1), (1, 64)) for n in (a, b)]
        args = (5, boxes[0], 7, boxes[1], 8)
        run(3, 1, 1, 99, 1234, "metadata", None, None, None, *args)
        made.clear()
        expanding(3, 99, 1234, "metadata", args)
        assert launched[-1] == launched[-2]
    assert [x.base is copies[2] for x in made] == [True, True]
    assert len(expanding.known) == 6
    for copy in [torch.empty(2, 64, dtype=torch.int8) for _ in range(dispatch.MOST_KNOWN)]:
        box = descriptor(copy, (2, 64), (64, 1), (1, 64))
        expanding(3, 99, 1234, "metadata", (5, box, 7, box, 8))
    assert len(expanding.known) <= dispatch.MOST_KNOWN
    run.launch_pdl = True
    assert dispatch._Expanding.of(run) is None


PROBE = SparseConfig(quantization="none", rule="probe")
ROOM = torch.empty(1, 2, 300, 136, dtype=torch.bfloat16)
NOT_TAKEN = {
    "float16": (ROOM[..., :128].half(), PROBE, {}),
    "float32": (ROOM[..., :128].float(), PROBE, {}),
    "wide": (ROOM, PROBE, {}),
    "narrow": (ROOM[..., :32], PROBE, {}),
    "strides": (ROOM.new_empty(1, 2, 300, 132)[..., :128], PROBE, {}),
    "channels apart": (ROOM.new_empty(1, 2, 128, 304).mT[:, :, :300], PROBE, {}),
    "address": (ROOM[..., 1:129], PROBE, {}),
    "padding": (ROOM[..., :128], PROBE, {"attn_mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)}),
    "window": (ROOM[..., :128], PROBE, {"window": (100, 0)}),
    "block of 32 keys": (ROOM[..., :128], replace(PROBE, block=(128, 32)), {}),
    "scale 0": (ROOM[..., :128], PROBE, {"scale": 0.0}),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_the_probe_does_not_take_goes_to_the_portable_kernel(monkeypatch, case):
    x, config, settings = NOT_TAKEN[case]
    inputs = prepare_inputs(x, x, x, **settings)
    assert not launch_probe.takes(inputs.signature, config)
    assert "triton" in probe_launch(monkeypatch, inputs, config)[0].__module__.split(".")


def test_the_probe_of_packed_sequences_goes_to_the_portable_kernel(monkeypatch):
    ends, x = torch.tensor([0, 100, 300], dtype=torch.int32), torch.empty(300, 2, 128, dtype=torch.bfloat16)
    inputs = pack_inputs(x, x, x, Packing(ends, ends), (200, 200), True, None, None, False)
    assert not launch_probe.takes(inputs.signature, PROBE)
    assert "triton" in probe_launch(monkeypatch, inputs, PROBE)[0].__module__.split(".")


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"window": (None, 10)}, {"scale": -1.0}], ids=str)
def test_what_the_probe_takes(monkeypatch, settings):
    x = ROOM.transpose(1, 2).contiguous().transpose(1, 2)[..., :128]  # channels of all heads next to each other
    inputs = prepare_inputs(x, x, x, **settings)
    assert "hopper" in probe_launch(monkeypatch, inputs, PROBE)[0].__module__.split(".")


@pytest.mark.parametrize("case", ["float16", "float32", "strides", "channels apart", "address"])
@pytest.mark.parametrize("quantization", ["int8", "int8-fp8"])
def test_the_probe_takes_any_numbers_that_have_int8_copies(monkeypatch, quantization, case):
    x, config, settings = NOT_TAKEN[case]
    inputs = prepare_inputs(x, x, x, **settings)
    found = probe_launch(monkeypatch, inputs, replace(config, quantization=quantization))
    assert "hopper" in found[0].__module__.split(".")
    assert found[2]["INT8"]


def prepare_launches(monkeypatch, inputs: Inputs, config: SparseConfig) -> list[tuple]:
    """Hopper's own, in their order."""
    pose_as_hopper(monkeypatch)
    noted = []
    with aot.recorded_launches(noted):
        launch.HopperBackend().summarize(inputs, config).finish()
    return [launched for launched in noted if "hopper" in launched[0].__module__]


@pytest.mark.parametrize(
    ("dims", "dtype", "block", "subblocks"),
    [((128, 128), torch.bfloat16, (128, 64), (4, 2)), ((64, 64), torch.float16, (256, 128), (8, 4)),
     ((96, 80), torch.bfloat16, (64, 64), (1, 8))],
    ids=str,
)  # fmt: skip
def test_preparation_compiles_and_fits(monkeypatch, dims, dtype, block, subblocks):
    q, k, v = (torch.empty(1, 2, 1000, dim, dtype=dtype) for dim in (dims[0], *dims))
    config = SparseConfig(quantization="int8-fp8", block=block, subblocks=subblocks)
    launches = prepare_launches(monkeypatch, prepare_inputs(q, k, v, needs_lse=False), config)
    assert len(launches) == len(launch_prepare.PROGRAMS)
    for (kernel, args, kwargs), together in zip(launches, launch_prepare.PROGRAMS.values(), strict=True):
        resources = aot.compile_kernel(kernel, args, kwargs, ARCH)
        reserved = 1024  # bytes of each program
        assert together * (resources.shared_bytes + reserved) <= (aot.SHARED_MEMORY_LIMIT[ARCH] + 1) * 1024
        assert together * resources.registers * 128 <= 65536
        assert resources.spill_bytes == 0
        assert not resources.serialized
        assert "wgmma.mma_async" in resources.ptx
        assert "cp.async.bulk.tensor" in resources.ptx
        assert "st.global.v4" in resources.ptx  # else the copies leave byte by byte


PLAIN = SparseConfig(quantization="int8-fp8")
NOT_PREPARED = {
    "lse": (ROOM[..., :128], PLAIN, {"needs_lse": True}),
    "padding": (ROOM[..., :128], PLAIN, {"attn_mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)}),
    "float32": (ROOM[..., :128].float(), PLAIN, {}),
    "strides": (ROOM.new_empty(1, 2, 300, 132)[..., :128], PLAIN, {}),
    "address": (ROOM[..., 1:129], PLAIN, {}),
    "wide": (ROOM, PLAIN, {}),
    "16-bit values": (ROOM[..., :128], replace(PLAIN, quantization="int8"), {}),
    "self-similarity": (ROOM[..., :128], replace(PLAIN, similarity=0.5), {}),
    "sub-blocks of 48 rows": (ROOM[..., :128], replace(PLAIN, block=(192, 64)), {}),
    "sub-blocks of 128 rows": (ROOM[..., :128], replace(PLAIN, subblocks=(1, 4)), {}),
}


@pytest.mark.parametrize("case", NOT_PREPARED)
def test_what_hopper_does_not_prepare_the_portable_kernels_do(monkeypatch, case):
    x, config, settings = NOT_PREPARED[case]
    inputs = prepare_inputs(x, x, x, **{"needs_lse": False, **settings})
    assert not launch_prepare.takes(inputs.signature, config)
    assert prepare_launches(monkeypatch, inputs, config) == []


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"window": (5, 5)}, {"scale": -1.0}], ids=str)
def test_what_hopper_prepares(monkeypatch, settings):
    x = ROOM.transpose(1, 2).contiguous().transpose(1, 2)[..., :128]  # channels of all heads next to each other
    assert len(prepare_launches(monkeypatch, prepare_inputs(x, x, x, needs_lse=False, **settings), PLAIN)) == 3
