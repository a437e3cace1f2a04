"""One model: built, checked with nothing skipped, then whole steps and attention alone, dense and sparse by turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparge.api import attention
from sparge.backends import BACKENDS
from sparge.bench.check import bound
from sparge.bench.results import FAILED, MEASURED, NOT_RUN, WRONG
from sparge.bench.timing import one_line
from sparge.config import SparseConfig
from sparge.integrations.layers import SPARSE
from sparge.integrations.patch import patch
from sparge.integrations.torch_sdpa import redirected
from sparge.latency.build import Place, build, make_inputs, missing_library
from sparge.latency.calls import Call, protecting_text, recorded
from sparge.latency.catalogue import Model
from sparge.latency.dense import DenseAttention
from sparge.latency.results import Row, Shape, Times
from sparge.observe import Observed, observed

EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")
# Relative L1 of a model's output that rounding alone stays below: layers add up, and 16 bits are few.
MAX_STEP_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
ATTENTION_TURNS = 5
ATTENTION_RUN = 100.0  # milliseconds of calls in a row: long enough for the clocks that a chip keeps under load
MOST_IN_A_ROW = 16
CYCLES_AHEAD = 100_000_000  # about 50 ms, in which the host launches what is timed after them


@dataclass(frozen=True)
class Settings:
    """How every model is measured."""

    device: torch.device
    dtype: torch.dtype
    steps: int  # timed, each way
    quantization: str


class WrongError(Exception):
    """What was to be timed is not what it should be; the message is one sentence."""


def own_format(device: torch.device) -> str:
    """The number format of sparge's best kernel here. Named, so that no call is left to torch for being short."""
    kernels = (backend for backend in BACKENDS if backend.name != "dense" and backend.unavailable() is None)
    return next(kernels).default_quantization(device)


def measure(model: Model, settings: Settings, on_stage: Callable[[str], None] = lambda stage: None) -> Row:
    """Never raises for what a model does; the row says what happened."""
    missing = missing_library(model)
    if missing is not None:
        return Row.of(model, NOT_RUN, missing)
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # here, not after: on a broken device it raises
        torch.cuda.reset_peak_memory_stats(settings.device)
    try:
        with torch.no_grad():
            return _measure(model, settings, on_stage)
    except WrongError as wrong:
        return Row.of(model, WRONG, str(wrong))
    except Exception as error:
        return Row.of(model, FAILED, one_line(error))


@dataclass(frozen=True)
class Subject:
    """A model that was built, the arguments of its forward, and its dense attention."""

    network: Any
    inputs: dict[str, Any]
    dense: DenseAttention

    def sparse_step(self, config: SparseConfig) -> Tensor:
        with redirected(self.dense), patch(self.network, config):  # layers left alone are the same both ways
            return self.forward()

    def forward(self) -> Tensor:
        output: Tensor = self.network(**self.inputs, return_dict=False)[0]
        return output

    def dense_call(self, call: Call) -> Tensor:
        return self.dense(call.query, call.key, call.value, **call.arguments)

    def sparse_call(self, call: Call, config: SparseConfig) -> Tensor:
        """As a patched layer makes it."""
        config = protecting_text(config, self.network, self.inputs, call.key.shape[2])
        output: Tensor = attention(call.query, call.key, call.value, **call.arguments, config=config)
        return output


def _measure(model: Model, settings: Settings, on_stage: Callable[[str], None]) -> Row:
    torch.manual_seed(0)
    place = Place(settings.device, settings.dtype)
    on_stage("building")
    network = build(model, place)
    subject = Subject(network, make_inputs(model, network, place), DenseAttention())
    on_stage("checking")
    reference, calls = _recorded_step(subject)
    call_error, step_error = _check_nothing_skipped(subject, calls, reference, settings.dtype)
    on_stage("timing")
    # One mean per block of rows: each of several would claim its own share, and flat attention spreads those.
    config = SparseConfig(rule="topk", topk=1 - model.sparsity, subblocks=(1, 4), quantization=settings.quantization)
    with observed() as seen:
        subject.sparse_step(config)
    _check_taken(subject, calls, config, seen)
    dense_steps, sparse_steps = _step_times(subject, config, settings)
    dense_attention, sparse_attention = _attention_times(subject, calls, config, settings.device)
    on_gpu = settings.device.type == "cuda"
    kernels = {subject.dense.kernel(call.query, call.key, call.value, call.arguments) for call in calls}
    return Row.of(
        model,
        MEASURED,
        weights=sum(parameter.numel() for parameter in network.parameters()),
        shape=_shape(calls),
        skipped=1 - seen.executed / seen.visible,
        quantization=", ".join(sorted({stats.quantization for stats in seen.calls})),
        backends=tuple(sorted(seen.backends)),
        dense_kernels=tuple(sorted(kernels)),
        call_error=call_error,
        step_error=step_error,
        peak_gib=torch.cuda.max_memory_allocated(settings.device) / 2**30 if on_gpu else None,
        times=Times(tuple(dense_steps), tuple(sparse_steps), dense_attention, sparse_attention),
    )


def _recorded_step(subject: Subject) -> tuple[Tensor, list[Call]]:
    plan = patch(subject.network, EXACT, dry_run=True)
    layers = [layer.name for layer in plan.layers if layer.action == SPARSE]
    with recorded(subject.network, layers, subject.dense) as calls:
        output = subject.forward()
    return output, list(calls.values())


def _shape(calls: Sequence[Call]) -> Shape:
    """Of the largest kind of call."""
    largest = max(calls, key=lambda call: call.query.numel())
    batch, heads, tokens, head_dim = largest.query.shape
    causal = bool(largest.arguments["is_causal"])
    count = sum(call.count for call in calls)
    return Shape(tokens, heads, largest.key.shape[1], head_dim, batch, causal, count)


# ---- checks before anything is timed


def _check_nothing_skipped(
    subject: Subject, calls: Sequence[Call], reference: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """Relative L1 against dense of the calls alone and of the whole model; WrongError if either is too far off."""
    call_error = max(relative_l1(subject.sparse_call(call, EXACT), subject.dense_call(call)) for call in calls)
    step_error = relative_l1(subject.sparse_step(EXACT), reference)
    limits = (2 * bound(EXACT.quantization, dtype), MAX_STEP_ERROR[dtype])  # both are rounded
    for what, error, limit in zip(("an attention call", "the model"), (call_error, step_error), limits, strict=True):
        if not error <= limit:  # NaN is too far
            raise WrongError(f"with nothing skipped {what} is off by {error:.2g} (relative L1), more than {limit:g}.")
    return call_error, step_error


def _check_taken(subject: Subject, calls: Sequence[Call], config: SparseConfig, seen: Observed) -> None:
    """Every attention call of the plan came to sparge, and the calls made alone are as large as those."""
    expected = sum(call.count for call in calls)
    if len(seen.calls) != expected:
        raise WrongError(f"{len(seen.calls)} of {expected} attention calls of a sparse step came to sparge.")
    visible = 0
    for call in calls:
        with observed() as alone:
            subject.sparse_call(call, config)
        visible += call.count * alone.visible
    if visible != seen.visible:
        raise WrongError(f"the attention calls to be timed alone see {visible} blocks, in the model {seen.visible}.")


def relative_l1(output: Tensor, reference: Tensor) -> float:
    return float((output.float() - reference.float()).abs().sum() / reference.float().abs().sum())


# ---- times


def _step_times(subject: Subject, config: SparseConfig, settings: Settings) -> tuple[list[float], list[float]]:
    """The two ways take turns, so that drift of the machine meets both alike. Both have run before."""
    dense, sparse = [], []
    with redirected(subject.dense):
        for _ in range(settings.steps):
            dense.append(milliseconds(subject.forward, settings.device))
            with patch(subject.network, config):
                sparse.append(milliseconds(subject.forward, settings.device))
    return dense, sparse


def _attention_times(
    subject: Subject, calls: Sequence[Call], config: SparseConfig, device: torch.device
) -> tuple[float, float]:
    """Medians of each kind of call, times how often a step makes it. On a GPU they do not wait for the host."""
    totals = [0.0, 0.0]
    for call in calls:
        ways = (partial(subject.dense_call, call), partial(subject.sparse_call, call, config))
        in_a_row = max(1, min(MOST_IN_A_ROW, int(ATTENTION_RUN / milliseconds(ways[0], device, ahead=True))))
        turns = [
            [milliseconds(partial(_repeat, way, in_a_row), device, ahead=True) / in_a_row for way in ways]
            for _ in range(ATTENTION_TURNS)
        ]
        for n, taken in enumerate(zip(*turns, strict=True)):
            totals[n] += call.count * median(taken)
    return totals[0], totals[1]


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def milliseconds(call: Callable[[], object], device: torch.device, ahead: bool = False) -> float:
    """`ahead`: a GPU is kept busy until all of the call is launched, so that the host's time does not count."""
    if device.type == "cpu":
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if ahead:
        torch.cuda._sleep(CYCLES_AHEAD)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end))
