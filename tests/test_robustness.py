"""What surrounds a call must not change it: global dtypes and devices, autocast, threads, tracers, interrupts."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from problems import EXACT, plain_attention, problem, seen_pairs, tensors
from torch.fx.experimental.proxy_tensor import make_fx

import sparge
from sparge import SparseConfig
from sparge.backends import BACKENDS, choose
from sparge.backends.cpu import launch

SPARSE = SparseConfig(rule="topk", topk=0.4, subblocks=(1, 1), quantization="none")


def outputs(q, k, v, config=SPARSE):
    return sparge.attention(q, k, v, is_causal=True, config=config, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("quantization", ["none", "int8", "int8-fp8"])
def test_the_default_dtype_changes_nothing(dtype, quantization):
    config = SparseConfig(quantization=quantization)
    q, k, v = tensors(q_len=300, dim=32)
    want, want_lse = outputs(q, k, v, config)
    torch.set_default_dtype(dtype)
    try:
        got, lse = outputs(q, k, v, config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)


def test_the_default_device_changes_nothing():
    q, k, v = tensors(q_len=300, dim=32)
    want, _ = outputs(q, k, v)
    with torch.device("meta"):
        got, _ = outputs(q, k, v)
    assert torch.equal(got, want)


@pytest.mark.parametrize("config", [EXACT, SPARSE, SparseConfig(quantization="int8")], ids=["exact", "sparse", "int8"])
def test_autocast_changes_nothing(config):
    q, k, v = tensors(q_len=300, dim=32)
    want, _ = outputs(q, k, v, config)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = outputs(q, k, v, config)
        mask = sparge.predict_mask(q, k, is_causal=True, config=config)
    assert torch.equal(got, want)
    assert mask.equals(sparge.predict_mask(q, k, is_causal=True, config=config))


def test_long_rows_of_biased_values_stay_exact():
    """Sums over many keys must not drift: every key adds to an output that is already large."""
    q, k, v = tensors(q_len=64, k_len=8192, heads=1, dim=64)
    out = sparge.attention(q, k, v + 4.0, config=EXACT)
    exact, _ = plain_attention(q, k, v + 4.0, seen_pairs(1, 1).expand(1, 64, 8192))
    assert (out - exact).abs().max() < 1e-5


def test_more_kernel_shapes_than_anyone_uses():
    for dim in range(16, 16 + 80):
        x = torch.randn(1, 1, 4, dim)
        assert torch.isfinite(sparge.attention(x, x, x, config=EXACT)).all()


def test_many_threads_on_new_shapes_at_once():
    problems = [tensors(seed, q_len=130 + seed, dim=100 + seed % 3) for seed in range(12)]
    want = [outputs(*problem)[0] for problem in problems]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda problem: outputs(*problem)[0], problems * 3))
    assert all(torch.equal(a, b) for a, b in zip(got, want * 3, strict=True))


def test_an_interrupted_call_waits_for_its_helpers():
    finished = threading.Event()

    def slow() -> None:
        time.sleep(0.2)
        finished.set()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch._run_at_once([interrupted, slow])
    assert finished.is_set()


@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vector_units_give_the_same(lanes, monkeypatch):
    """AVX2 and NEON kernels, run on whatever this machine has."""
    kernel = pytest.importorskip("sparge.backends.cpu._attend")
    q, k, v = tensors(q_len=300, dim=48)
    want, want_lse = outputs(q, k, v)
    machine = kernel._machine
    narrow = kernel.Machine(lanes=lanes, tile_vectors=2)
    monkeypatch.setattr(kernel, "_machine", lambda: (machine()[0], narrow))
    monkeypatch.setattr(kernel, "_compiled", {})
    got, lse = outputs(q, k, v)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


def test_an_unusable_llvmlite_is_passed_over_with_a_reason(monkeypatch):
    monkeypatch.setattr(launch, "_broken_llvmlite", lambda: "llvmlite does not work here")
    q, k, v = tensors()
    _, stats = sparge.attention(q, k, v, config=SparseConfig(quantization="none"), return_stats=True)
    assert stats.backend == "torch"
    assert "llvmlite does not work here" in stats.reason


# ---- tracers


def function(q, k, v):
    return sparge.attention(q * 1.0, k, v, is_causal=True, config=SPARSE, return_lse=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("default")
def test_torch_compile_sees_one_graph(backend):
    q, k, v = tensors(q_len=200, dim=32)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for got, want in zip(compiled(q, k, v), function(q, k, v), strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("default")
def test_compiled_stats_and_layouts():
    q, k, v = (x.transpose(1, 2) for x in tensors(q_len=200, dim=32))

    def call(q, k, v):
        return sparge.attention(q, k, v, layout="BSHD", window=(64, None), return_stats=True)

    output, stats = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    want, want_stats = call(q, k, v)
    assert torch.equal(output, want)
    assert torch.equal(stats.executed, want_stats.executed)


def test_make_fx_records_the_operator():
    q, k, v = tensors(q_len=200, dim=32)
    graph = make_fx(function)(q, k, v)
    other = tensors(7, q_len=200, dim=32)
    for got, want in zip(graph(*other), function(*other), strict=True):
        assert torch.equal(got, want)


def test_other_functions_refuse_to_be_traced():
    q, k, v = tensors(q_len=200, dim=32)
    mask = sparge.predict_mask(q, k)
    with pytest.raises(RuntimeError, match="tracers"):
        make_fx(lambda q, k, v: sparge.block_sparse_attention(q, k, v, mask))(q, k, v)


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_operator_is_well_formed(return_lse):
    q, k, v = tensors(q_len=100, dim=32)
    arguments = (q, k, v, None, True, None, False, -1, -1, "BHSD", SPARSE.encoded, return_lse)
    torch.library.opcheck(torch.ops.sparge.attention.default, arguments)


def test_configs_survive_the_operators_encoding():
    from sparge.library import _decode

    odd = SparseConfig(
        rule=("gap", "topk"),
        gap=float("inf"),
        topk=(0.1, 0.2),
        protected=((0, 3), (-2, None)),
        pv_threshold=(-1.0, -2.0),
    )
    assert _decode(odd.encoded) == odd
    assert _decode("{}") == SparseConfig()


def test_dense_attention_is_never_chosen_without_a_reason(monkeypatch):
    dense = BACKENDS[0]
    monkeypatch.setattr(type(dense), "unavailable", lambda self: None)
    monkeypatch.setattr(type(dense), "unsupported", lambda self, inputs, config: None)
    inputs = problem(*tensors(q_len=100, dim=32))
    choice = choose(inputs, SparseConfig())
    assert choice.backend is dense
    assert "sparsity cannot help" in choice.reason
    with_mask = choose(inputs, SparseConfig(), own_mask=True)
    assert with_mask.backend is not dense
    assert "dense: the call brings its own mask" in with_mask.reason


def test_stats_belong_to_the_caller(monkeypatch):
    """A backend may hand out a view of zeros it shares between calls."""
    q, k, v = tensors(heads=1, q_len=100, dim=32)
    zero = torch.zeros((), dtype=torch.int64)
    backend = next(one for one in BACKENDS if one.name == "reference")
    attend = backend.attend
    shared = lambda *args: replace(attend(*args), skipped_pv=zero.expand(1, 1))  # noqa: E731
    monkeypatch.setattr(backend, "attend", shared, raising=False)
    monkeypatch.setattr("sparge.backends.BACKENDS", (backend,))
    _, stats = sparge.attention(q, k, v, return_stats=True)
    stats.skipped_pv.add_(5)
    assert zero == 0


def test_backends_come_best_first():
    assert [backend.name for backend in BACKENDS] == ["dense", "hopper", "triton", "cpu", "torch", "reference"]
