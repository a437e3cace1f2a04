"""Checks before times: a wrong result has no speed, a missing contender has a reason."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparge
from sparge.backends.cpu.launch import CpuBackend
from sparge.backends.gather import GatherBackend
from sparge.bench import contenders, timing
from sparge.bench import measure as measuring
from sparge.bench.cases import Case
from sparge.bench.check import MAX_RELATIVE_L1, bound, exact_samples, relative_l1
from sparge.bench.contenders import CONTENDERS, Contender
from sparge.bench.measure import measure
from sparge.bench.problems import CannotRunError, Settings, make_problem
from sparge.bench.results import FAILED, MEASURED, NOT_RUN, OURS, WRONG

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, heads=2, backend="torch")
SMALL = Case(256, 16, quantization="none")


# ---- the check


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_exact_samples_are_attention_over_the_mask(causal: bool, group: int) -> None:
    problem = make_problem(replace(SMALL, causal=causal, group=group), SETTINGS)
    output = sparge.block_sparse_attention(
        *problem.tensors, problem.mask, is_causal=causal, enable_gqa=group > 1, quantization="none"
    )
    samples = exact_samples(problem.inputs, problem.mask)
    assert sum(len(sample.rows) for sample in samples) == 2 * 256  # every row of both heads
    assert relative_l1(output, samples) < 1e-5


def test_exact_samples_without_a_mask_are_dense_attention() -> None:
    problem = make_problem(replace(SMALL, causal=True), SETTINGS)
    output = torch.nn.functional.scaled_dot_product_attention(*problem.tensors, is_causal=True)
    assert relative_l1(output, exact_samples(problem.inputs)) < 1e-5


def test_long_problems_are_sampled() -> None:
    problem = make_problem(replace(SMALL, tokens=8320, sparsity=0.95), replace(SETTINGS, heads=1))
    rows = sum(len(sample.rows) for sample in exact_samples(problem.inputs, problem.mask))
    assert 128 <= rows <= 8 * 128


@pytest.mark.parametrize("spoil", [lambda x: x * 1.2, lambda x: x.roll(1, 2), lambda x: x.fill_(torch.nan)])
def test_the_check_rejects_wrong_values(spoil) -> None:
    problem = make_problem(SMALL, SETTINGS)
    right = sparge.block_sparse_attention(*problem.tensors, problem.mask, quantization="none")
    error = relative_l1(spoil(right), exact_samples(problem.inputs, problem.mask))
    assert not error <= max(MAX_RELATIVE_L1.values())


def test_bounds_follow_the_number_formats() -> None:
    assert [bound(name, torch.bfloat16) for name in ("none", "int8", "int8-fp8")] == [0.01, 0.03, 0.045]
    assert bound("none", torch.float32) < 1e-3


# ---- one case


def test_a_case_has_an_entry_for_every_part_and_contender() -> None:
    row = measure(replace(SMALL, causal=True), SETTINGS)
    assert row.outcome == MEASURED
    assert row.base == "sdpa"
    assert row.backend == "torch"
    for name in (*OURS, "sdpa"):
        assert (row.milliseconds(name) or 0) > 0
    assert row.ratio("sdpa") == 1
    assert row.ratio("total") == pytest.approx(row.milliseconds("sdpa") / row.milliseconds("total"))
    missing = {timing.name: timing.reason for timing in row.timings if timing.milliseconds is None}
    assert set(missing) >= {"cudnn", "flash", "flex", "sage", "graph_total", "graph_attend"}
    assert all(missing.values())
    assert {contender.name for contender in CONTENDERS} <= {timing.name for timing in row.timings}


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = GatherBackend.attend

    def spoiled(self, *arguments):
        output = attend(self, *arguments)
        return replace(output, values=output.values * 1.01)

    monkeypatch.setattr(GatherBackend, "attend", spoiled)
    row = measure(SMALL, SETTINGS)
    assert row.outcome == WRONG
    assert row.timings == ()
    assert row.relative_l1 == pytest.approx(0.01, rel=0.1)
    assert "relative L1" in row.reason


def test_a_result_of_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = GatherBackend.attend
    monkeypatch.setattr(
        GatherBackend,
        "attend",
        lambda self, *x: replace(attend(self, *x), values=torch.full((1, 2, 256, 16), torch.nan)),
    )
    row = measure(SMALL, SETTINGS)
    assert row.outcome == WRONG
    assert row.relative_l1 is None  # JSON has no NaN


def test_a_failure_of_ours_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, *arguments):
        raise RuntimeError("the kernel broke\nin detail")

    monkeypatch.setattr(GatherBackend, "attend", broken)
    row = measure(SMALL, SETTINGS)
    assert (row.outcome, row.reason, row.timings) == (FAILED, "RuntimeError: the kernel broke", ())


def _fails(problem):
    raise AssertionError("headdim should be in [64, 96, 128].")


def _doubled(problem):
    return lambda: 2 * torch.nn.functional.scaled_dot_product_attention(*problem.tensors)


def _works_twice(problem):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > 2:
            raise MemoryError("no memory left")
        return torch.nn.functional.scaled_dot_product_attention(*problem.tensors)

    return call


@pytest.mark.parametrize(
    ("build", "setting", "said"),
    [
        (_fails, None, "headdim should be"),
        (_doubled, None, "wrong result"),
        (_works_twice, None, "no memory left"),
        (
            lambda problem: partial(torch.nn.functional.scaled_dot_product_attention, *problem.tensors, dropout_p=2.0),
            partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
            "Error",
        ),
    ],
    ids=["raises", "wrong", "fails later", "no kernel"],
)
def test_a_contender_that_fails_says_why_and_stops_nobody(
    build, setting, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = Contender("rival", "a rival", build, lambda device: None, **({"setting": setting} if setting else {}))
    monkeypatch.setattr(measuring, "CONTENDERS", (rival, *CONTENDERS))
    row = measure(SMALL, SETTINGS)
    assert row.outcome == MEASURED
    entry = row.timing("rival")
    assert entry is not None
    assert entry.milliseconds is None
    assert said in entry.reason
    assert row.ratio("total") is not None


def test_left_out_contenders_say_so() -> None:
    row = measure(SMALL, replace(SETTINGS, without=("sdpa",)))
    entry = row.timing("sdpa")
    assert entry is not None
    assert entry.reason == "left out by --without"
    assert row.milliseconds("total") is not None
    assert row.ratio("total") is None  # nothing to compare with


@pytest.mark.parametrize(
    ("case", "settings", "said"),
    [
        (replace(SMALL, mask="real"), SETTINGS, "--captured"),
        (replace(SMALL, group=4), SETTINGS, "groups of 4"),
        (replace(SMALL, quantization="int8"), SETTINGS, "floating point only"),
        (replace(SMALL, quantization="int8-fp8"), Settings(CPU, 2), "triton: "),
    ],
)
def test_cases_that_cannot_run_say_why(case: Case, settings: Settings, said: str) -> None:
    row = measure(case, settings)
    assert row.outcome == NOT_RUN
    assert said in row.reason


def test_the_default_backend_is_a_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(replace(SMALL, quantization="auto"), Settings(CPU, 2))
    assert problem.backend.name in ("cpu", "torch")
    assert problem.case.quantization == problem.config.quantization == "none"
    for backend in (CpuBackend, GatherBackend):
        monkeypatch.setattr(backend, "unavailable", lambda self: "hidden")
    with pytest.raises(CannotRunError, match="hidden"):
        make_problem(SMALL, Settings(CPU, 2))  # neither dense nor the oracle stands in


def test_the_timed_calls_take_turns() -> None:
    order: list[str] = []
    actions = {name: timing.Timed(partial(order.append, name)) for name in "ab"}
    taken = timing.medians(actions, CPU)
    assert "".join(order) == "ab" * timing.CPU_TURNS
    assert set(taken) == {"a", "b"}


def test_gpu_times_are_do_bench_medians_each_in_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("triton.testing")
    entered: list[str] = []

    @contextmanager
    def setting():
        entered.append("in")
        yield
        entered.append("out")

    def do_bench(call, warmup: int, rep: int, return_mode: str) -> float:
        assert return_mode == "median"
        call()
        return 1.5

    def fails() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(testing, "do_bench", do_bench)
    actions = {"a": timing.Timed(lambda: entered.append("a"), setting), "b": timing.Timed(fails)}
    taken = timing.medians(actions, torch.device("cuda"))
    assert taken == {"a": 1.5, "b": "RuntimeError: out of memory"}
    assert entered == ["in", "a", "out"]


def test_repeated_heads_for_a_contender_are_noted(monkeypatch) -> None:
    """torch may refuse grouped heads to cuDNN: it then gets more memory to read, and the row says so."""
    plain = contenders.scaled_dot_product_attention

    def refusing(*args, enable_gqa: bool = False, **kwargs):
        if enable_gqa:
            raise RuntimeError("No available kernel.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(contenders, "scaled_dot_product_attention", refusing)
    cudnn = replace(CONTENDERS[0], missing=lambda device: None, setting=contenders.nullcontext)
    monkeypatch.setattr(measuring, "CONTENDERS", (cudnn,))
    for group in (1, 2):
        row = measure(replace(SMALL, group=group), SETTINGS)
        timing_of = next(t for t in row.timings if t.name == "cudnn")
        assert timing_of.milliseconds is not None
        assert ("repeated" in timing_of.note) == (group == 2)


def test_the_whole_call_predicts_and_then_follows_the_cases_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    select, predicted = GatherBackend.select, []
    monkeypatch.setattr(GatherBackend, "select", staticmethod(lambda *x: predicted.append(1) or select(*x)))
    problem = make_problem(SMALL, SETTINGS)
    call = measuring._whole_call(problem)
    samples = exact_samples(problem.inputs, problem.mask)
    assert all(relative_l1(call(), samples) < 1e-5 for _ in range(3))
    assert len(predicted) == 3


def test_calls_after_a_case_follow_masks_of_their_own() -> None:
    problem = make_problem(SMALL, SETTINGS)
    before = sparge.attention(*problem.tensors, config=problem.config)
    measure(SMALL, SETTINGS)
    assert torch.equal(sparge.attention(*problem.tensors, config=problem.config), before)
