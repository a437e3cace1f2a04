"""What only a GPU shows: streams, graphs, compilers, threads, long sequences, and that the host never waits."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from problems import plain_attention, randn, relative_l1, seen_pairs

import sparge
from sparge import SparseConfig, budget, calls, exact
from sparge.backends import choose
from sparge.inputs import prepare_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SPARSE = SparseConfig(rule="topk", topk=0.4, quantization="int8-fp8")
FORMATS = ("none", "int8", "int8-fp8")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
FASTEST = "hopper" if HOPPER else "triton"  # with the default block


def on_gpu(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return randn(seed, *shape).to("cuda", dtype)


def problem(seed: int = 0, heads: int = 4, tokens: int = 1500, dim: int = 64) -> list[torch.Tensor]:
    return [on_gpu(3 * seed + n, 1, heads, tokens, dim) for n in range(3)]


def test_the_best_kernel_is_chosen():
    _, stats = sparge.attention(*problem(), config=SPARSE, return_stats=True)
    assert stats.backend == FASTEST
    assert stats.reason.startswith("dense: the call asks for int8-fp8")
    _, stats = sparge.attention(*problem(), config=SparseConfig(quantization="none"), return_stats=True)
    assert stats.backend == FASTEST
    _, stats = sparge.attention(*problem(), config=replace(SPARSE, pv_threshold=-3.0), return_stats=True)
    assert stats.backend == FASTEST
    _, stats = sparge.attention(*problem(), config=replace(SPARSE, block=(64, 64)), return_stats=True)
    assert stats.backend == "triton"


def test_auto_takes_dense_attention_where_sparsity_cannot_help():
    q, k, v = problem(tokens=300)
    out, stats = sparge.attention(q, k, v, is_causal=True, return_stats=True)
    assert stats.backend == "dense"
    assert "sparsity cannot help" in stats.reason
    assert float(stats.sparsity) == 0.0
    want, _ = plain_attention(q.cpu(), k.cpu(), v.cpu(), seen_pairs(300, 300, True))
    assert relative_l1(out.cpu(), want) < 0.01


def test_a_mask_of_ones_own_is_followed():
    q, k, v = problem(tokens=300)
    mask = sparge.BlockMask.from_dense(torch.eye(3, 5, device="cuda").bool(), 300, 300)
    out, stats = sparge.block_sparse_attention(q, k, v, mask, return_stats=True)
    assert stats.backend == FASTEST
    assert "own mask" in stats.reason
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, :128], k[:, :, :64], v[:, :, :64])
    assert relative_l1(out[:, :, :128].cpu(), want.cpu()) < 0.08


@pytest.mark.parametrize(("q_len", "k_len"), [(77, 300), (1, 300), (300, 300)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "dtype"), [(4, torch.bfloat16), (2, torch.float16), (4, torch.float32)])
def test_dense_attention_follows_the_contract(q_len, k_len, is_causal, heads, dtype):
    q = on_gpu(0, 2, 4, q_len, 64, dtype=dtype)
    k, v = (on_gpu(n, 2, heads, k_len, 64, dtype=dtype) for n in (1, 2))
    out, stats = sparge.attention(q, k, v, is_causal=is_causal, enable_gqa=True, return_stats=True)
    assert stats.backend == "dense", stats.reason
    want, _ = plain_attention(q.cpu(), k.cpu(), v.cpu(), seen_pairs(q_len, k_len, is_causal))
    assert relative_l1(out.cpu(), want) < 0.01


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device():
    q, k, v = problem()
    padding = torch.arange(1500, device="cuda")[None, None, None] < 1400
    ends = torch.tensor([0, 700, 1500], device="cuda", dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    calls = [
        lambda config: sparge.attention(q, k, v, config=config),
        lambda config: sparge.attention(q, k, v, is_causal=True, config=config, return_lse=True),
        lambda config: sparge.attention(q, k, v, padding, config=config, return_stats=True),
        lambda config: sparge.varlen_attention(*packed, ends, ends, 800, 800, config=config, return_stats=True),
        lambda config: sparge.predict_mask(q, k, config=config),
    ]
    configs = [SPARSE, SparseConfig(quantization="none", pv_threshold=-3.0), SparseConfig(similarity=0.2)]
    configs.append(SparseConfig(rule="topk", topk=1.0, quantization="int8"))
    configs.append(SparseConfig(rule="topk", topk=0.2, quantization="int8-fp8", max_error=0.1))
    pairs = [(call, config) for call in calls for config in configs]
    pairs.remove((calls[3], configs[-1]))  # a budget is checked sequence by sequence: the host reads where they end
    for call, config in pairs:
        call(config)  # compiles and fills caches
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call, config in pairs:
            call(config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dim", [64, 20])  # with and without torch's fused kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_rows_do_not_depend_on_how_many_keys_are_taken_at_once(dim, dtype, monkeypatch):
    q, k, v = (on_gpu(n, 2, heads, 1501, dim, dtype=dtype) for n, heads in enumerate((4, 2, 2)))
    padding = torch.arange(1501, device="cuda") < torch.tensor([[1400], [900]], device="cuda")
    inputs = prepare_inputs(q, k, v, padding[:, None, None], 0.0, True, None, True, None, "BHSD")
    rows = torch.arange(0, 1501, 17, device="cuda")
    want = exact.exact_rows(inputs, rows)
    monkeypatch.setattr(exact, "PAIRS_AT_ONCE", 1 << 17)
    monkeypatch.setattr(exact, "SCORES_AT_ONCE", 1 << 17)
    assert exact._is_fused(q, k, v) == (dim == 64 or dtype == torch.float32)
    assert relative_l1(exact.exact_rows(inputs, rows).cpu(), want.cpu()) < (0.01 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "over", [[[1, 0, 0, 1], [0, 0, 1, 0]], [[0] * 4] * 2, [[1] * 4] * 2], ids=["some", "none", "all"]
)
def test_heads_are_redone_in_their_place(quantization, is_causal, over):
    q, k, v = (on_gpu(n, 2, heads, 1501, 128) for n, heads in enumerate((4, 2, 2)))
    inputs = prepare_inputs(q, k, v, is_causal=is_causal, enable_gqa=True)
    config = SparseConfig(rule="topk", topk=0.1, quantization=quantization)
    backend = choose(inputs, config).backend
    assert backend.name == FASTEST
    blocks = backend.summarize(inputs, config)
    output = backend.attend(blocks, backend.select(blocks, config), config)
    before, lse = output.values.clone(), output.lse.clone()
    heads = torch.tensor(over, device="cuda").bool()
    budget.redo(heads, output, blocks, backend, config)
    assert torch.equal(output.values[~heads], before[~heads])
    assert torch.equal(output.lse[~heads], lse[~heads])
    want, want_lse = plain_attention(q.cpu(), k.cpu(), v.cpu(), seen_pairs(1501, 1501, is_causal))
    heads = heads.cpu()
    if heads.any():
        assert relative_l1(output.values.cpu()[heads], want[heads]) < 0.01
        assert (output.lse.cpu()[heads] - want_lse[heads]).abs().max() < 0.01


def test_random_values_cost_no_more_than_their_formats():
    """So many that they average to a hundredth: a bias of a thousandth, which no short sequence shows, is a tenth."""
    q, k, v = (on_gpu(n, 1, 2, 1 << 15, 128) for n in range(3))
    config = SparseConfig(rule="topk", topk=1.0, quantization="int8-fp8")
    out = sparge.attention(q, k, v, config=config)
    rows = torch.arange(0, 1 << 15, 512, device="cuda")
    want = exact.exact_rows(prepare_inputs(q.float(), k.float(), v.float()), rows)
    assert relative_l1(out[:, :, rows].cpu(), want.cpu()) < 0.040


def test_heads_without_16_bit_inputs_are_redone_in_the_formats_of_the_call():
    """Float32 tiles of this width do not fit."""
    q, k, v = (on_gpu(n, 1, 2, 700, 160, dtype=torch.float32) for n in range(3))
    config = SparseConfig(rule="topk", topk=0.1, quantization="int8-fp8", max_error=0.2)
    out, stats = sparge.attention(q, k, v, config=config, return_stats=True)
    assert stats.redone.all()
    want, _ = plain_attention(q.cpu(), k.cpu(), v.cpu(), seen_pairs(700, 700))
    assert relative_l1(out.cpu(), want) < 0.08


def test_stats_and_budgets_need_no_mask_of_a_byte_per_block():
    """128K tokens in 32 heads: 67 MB in bytes, 0.5 GB in numbers; a mask of all sampled pairs would be over a GB."""
    q, k, v = on_gpu(0, 1, 32, 1 << 17, 64), *(on_gpu(n, 1, 8, 1 << 17, 64) for n in (1, 2))

    def peak(**asked):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sparge.attention(q, k, v, is_causal=True, enable_gqa=True, **asked)
        return torch.cuda.max_memory_allocated() - before

    plain = peak(config=SPARSE)
    assert peak(config=SPARSE, return_stats=True) <= plain + (64 << 20)
    assert peak(config=replace(SPARSE, max_error=0.1)) <= plain + (512 << 20)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_error_budget_is_kept(quantization, is_causal):
    q, k, v = problem(tokens=2000)
    q[:, 1:] *= 0.1  # these heads look everywhere alike: no block may be skipped
    config = SparseConfig(rule="topk", topk=0.2, quantization=quantization)
    careful = replace(config, max_error=0.1)
    want, _ = plain_attention(*(x.cpu() for x in (q, k, v)), seen_pairs(2000, 2000, is_causal))
    rough = sparge.attention(q, k, v, is_causal=is_causal, config=config)
    out, stats = sparge.attention(q, k, v, is_causal=is_causal, config=careful, return_stats=True)
    assert stats.redone[0, 1:].all()
    for head in range(4):
        error = relative_l1(out[:, head].cpu(), want[:, head])
        assert error < (0.01 if stats.redone[0, head] else 0.1)
        assert abs(error - float(stats.error[0, head])) < 0.03
        if not stats.redone[0, head]:
            assert torch.equal(out[:, head], rough[:, head])


@pytest.mark.parametrize("max_error", [None, 0.3])
@pytest.mark.parametrize("quantization", FORMATS)
def test_cuda_graphs_replay(quantization, max_error):
    config = SparseConfig(rule="topk", topk=0.4, quantization=quantization, max_error=max_error)
    q, k, v = problem()
    sparge.attention(q, k, v, is_causal=True, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparge.attention(q, k, v, is_causal=True, config=config)
    for seed in (1, 2):
        for x, fresh in zip((q, k, v), problem(seed), strict=True):
            x.copy_(fresh)
        graph.replay()
        assert torch.equal(out, sparge.attention(q, k, v, is_causal=True, config=config))


@pytest.mark.parametrize("quantization", FORMATS)
def test_later_calls_of_a_kind_give_what_the_whole_way_gives(quantization):
    """Only their kernels are started, on the current stream."""
    config = replace(SPARSE, quantization=quantization)
    for seed in range(5):
        tensors = problem(seed)
        want, _ = sparge.attention(*tensors, config=config, return_stats=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            got = sparge.attention(*tensors, config=config)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
    (known,) = calls._known.values()
    assert known.replay is not None
    assert known.replay.ready


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own modules, when inductor loads them
def test_torch_compile_without_graph_breaks():
    q, k, v = problem()

    @torch.compile(fullgraph=True)
    def block(q, k, v):
        return sparge.attention(q * 1.0, k, v, is_causal=True, config=SPARSE) + 1.0

    torch.testing.assert_close(block(q, k, v), sparge.attention(q, k, v, is_causal=True, config=SPARSE) + 1.0)


def test_two_streams_do_not_disturb_each_other():
    problems = [problem(seed, tokens=3000) for seed in range(2)]
    want = [sparge.attention(*p, config=SPARSE) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for stream, p in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                got.append(sparge.attention(*p, config=SPARSE))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_threads_do_not_disturb_each_other():
    problems = [problem(seed, tokens=700 + 50 * seed) for seed in range(6)]
    want = [sparge.attention(*p, config=SPARSE).cpu() for p in problems]
    got: dict[int, torch.Tensor] = {}

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                out = sparge.attention(*problems[n], config=SPARSE)
            got[n] = out.cpu()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[n], want[n]) for n in range(len(problems)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_used_whatever_the_current_one():
    q, k, v = problem()
    there = sparge.attention(*(x.to("cuda:1") for x in (q, k, v)), config=SPARSE)
    assert there.device == torch.device("cuda:1")
    assert torch.equal(there.cpu(), sparge.attention(q, k, v, config=SPARSE).cpu())


def test_one_compiled_kernel_serves_every_length():
    from sparge.backends.triton._attend import attend
    from sparge.backends.triton._prepare import prepare
    from sparge.backends.triton._select import expand, select

    def run(tokens: int) -> None:
        q, k, v = problem(tokens=tokens)
        sparge.attention(q, k, v, is_causal=True, config=SPARSE)

    def compiled() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in (prepare, select, expand, attend))

    run(1024)
    known = compiled()
    for tokens in (1, 17, 1000, 1025, 4096, 5001):
        run(tokens)
    assert compiled() == known


def test_results_are_reproducible():
    q, k, v = problem(tokens=5000)
    first = sparge.attention(q, k, v, is_causal=True, config=SPARSE)
    assert all(torch.equal(first, sparge.attention(q, k, v, is_causal=True, config=SPARSE)) for _ in range(5))


def sampled_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, is_causal: bool) -> float:
    """Largest relative L1 of a few rows of the first and last head, against float64."""
    worst, offset = 0.0, k.shape[2] - q.shape[2]
    for head in {0, q.shape[1] - 1}:
        for row in (0, q.shape[2] // 2, q.shape[2] - 1):
            stop = row + offset + 1 if is_causal else k.shape[2]
            scores = k[0, head, :stop].double() @ q[0, head, row].double() / q.shape[-1] ** 0.5
            want = scores.softmax(0) @ v[0, head, :stop].double()
            worst = max(worst, relative_l1(out[0, head, row].cpu(), want.cpu()))
    return worst


@pytest.mark.parametrize(("quantization", "bound"), [("none", 0.01), ("int8", 0.05), ("int8-fp8", 0.08)])
def test_a_quarter_of_a_million_tokens(quantization, bound):
    q, k, v = (torch.randn(1, 2, 262_144 + 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v += 1.0  # sums of random values would vanish beside their rounding
    config = SparseConfig(rule="topk", topk=1.0, quantization=quantization)
    out = sparge.attention(q, k, v, is_causal=True, config=config)
    assert sampled_error(q, k, v, out, True) < bound
    sparse, stats = sparge.attention(
        q, k, v, is_causal=True, config=SparseConfig(quantization=quantization), return_stats=True
    )
    assert sparse.isfinite().all()
    assert (stats.executed <= stats.visible).all()


@pytest.mark.parametrize("long_side", ["queries", "keys"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_offsets_past_32_bits(quantization, long_side):
    """36 heads of 256K tokens and 256 channels are 2.4e9 elements."""
    q_len, k_len = (262_144, 192) if long_side == "queries" else (192, 262_144)
    q = torch.randn(1, 36, q_len, 256, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 36, k_len, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v += 1.0
    config = SparseConfig(rule="topk", topk=1.0, quantization=quantization)
    out = sparge.attention(q, k, v, config=config)
    assert sampled_error(q, k, v, out, False) < {"none": 0.01, "int8": 0.05, "int8-fp8": 0.08}[quantization]
