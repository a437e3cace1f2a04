"""One case: ours checked, then the contenders, then every time."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sparge.api import attention
from sparge.backends import Choice
from sparge.bench.cases import Case
from sparge.bench.check import Sample, bound, exact_samples, relative_l1
from sparge.bench.contenders import CONTENDERS, Contender, Noted, base_name
from sparge.bench.problems import CannotRunError, Problem, Settings, make_problem
from sparge.bench.results import FAILED, GRAPHED, MEASURED, NOT_RUN, OURS, WRONG, Row, Timing
from sparge.bench.timing import Timed, extra_memory, medians, one_line
from sparge.block_mask import BlockMask
from sparge.calls import forget, kind_of_call, remember
from sparge.config import SparseConfig
from sparge.stages import Blocks

CALLS_UNTIL_REPLAYED = 2  # after the first of all: the one that is recorded, and its first replay


class WrongResultError(Exception):
    """A result that is further from the exact one than its number formats allow."""


@dataclass
class Entrants:
    """What will be timed, and what will not, with its reason; the errors of both."""

    ready: dict[str, Timed] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def measure(case: Case, settings: Settings) -> Row:
    """Never raises for what a case or a contender does; the row says what happened."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch explains at length which kernels it did not take
            return _measure(case, settings)
    except CannotRunError as refusal:
        return Row(case, NOT_RUN, str(refusal))
    except Exception as error:
        return Row(case, FAILED, one_line(error))
    finally:
        forget()  # calls that follow a case's mask


def _measure(case: Case, settings: Settings) -> Row:
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # here, not after: on a broken device it raises
    problem = make_problem(case, settings)
    limit = bound(problem.config.quantization, settings.dtype)
    row = Row(
        problem.case, MEASURED, heads=problem.inputs.query.shape[1], backend=problem.backend.name,
        skipped=float(problem.mask.sparsity), base=base_name(settings.device), max_relative_l1=limit,
    )  # fmt: skip
    samples = exact_samples(problem.inputs, problem.mask)
    entrants, total = Entrants(), _whole_call(problem)
    try:
        _enter_ours(problem, total, samples, limit, entrants)
    except WrongResultError as wrong:
        return replace(row, outcome=WRONG, reason=str(wrong), relative_l1=_finite(entrants.errors.get("total")))
    dense = exact_samples(problem.inputs)
    for contender in CONTENDERS:
        if contender.name in settings.without:
            entrants.refused[contender.name] = "left out by --without"
        else:
            _enter_contender(contender, problem, samples if contender.follows_mask else dense, entrants)
    timings = _timings(entrants, medians(entrants.ready, settings.device), row.base)
    return replace(
        row,
        relative_l1=entrants.errors["total"],
        extra_memory=extra_memory(total, problem.tensors),
        timings=timings,
    )


def _whole_call(problem: Problem) -> Callable[[], Tensor]:
    """The library's own call, as a model makes it again and again: it predicts a mask, then follows the case's.

    It takes these calls for others than the first, in which kernels are compiled.
    """
    inputs, config, mask = problem.inputs, problem.config, problem.mask

    class Following(type(problem.backend)):  # type: ignore[misc]
        def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask:
            super().select(blocks, config)
            return mask

    causal, grouped = problem.case.causal, problem.case.group > 1
    kind = kind_of_call(*problem.tensors, None, 0.0, causal, None, grouped, config, None, "BHSD", False)
    remember(kind, inputs, Choice(Following(), config, "the case"))
    return partial(attention, *problem.tensors, is_causal=causal, enable_gqa=grouped, config=config)


def _stages(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Ours as a whole, and its parts; a part without values of its own gives what it computed last."""
    backend, config, mask = problem.backend, problem.config, problem.mask
    blocks = backend.summarize(problem.inputs, config)
    blocks.finish()

    def total() -> Tensor:
        mine = backend.summarize(problem.inputs, config)
        backend.select(mine, config)
        return backend.attend(mine, mask, config).values

    def attend() -> Tensor:
        return backend.attend(blocks, mask, config).values

    def predict() -> Tensor:
        chosen: BlockMask = backend.select(backend.summarize(problem.inputs, config), config)
        return chosen.bits

    def prepare() -> Tensor:
        made: Blocks = backend.summarize(problem.inputs, config)
        made.finish()
        return made.q_means

    def select() -> Tensor:
        chosen: BlockMask = backend.select(blocks, config)
        return chosen.bits

    return dict(zip(OURS, (total, attend, predict, prepare, select), strict=True))


def _enter_ours(
    problem: Problem, total: Callable[[], Tensor], samples: list[Sample], limit: float, entrants: Entrants
) -> None:
    """Checks what gives values, launched one by one and from a graph; WrongResultError if one of them is wrong."""
    stages = _stages(problem)
    stages["total"]()
    for name, call in {**stages, "total": total}.items():
        for _ in range(CALLS_UNTIL_REPLAYED if name == "total" else 1):
            output = call()
            if name in ("total", "attend"):
                _check(name, output, samples, limit, entrants)
        entrants.ready[name] = Timed(call)
    for name, graphed in zip(OURS, GRAPHED, strict=True):
        if not problem.inputs.query.is_cuda:
            entrants.refused[graphed] = "CUDA graphs need an NVIDIA GPU"
            continue
        try:
            replay, output = captured_graph(stages[name])
        except Exception as error:
            entrants.refused[graphed] = one_line(error)
            continue
        if name in ("total", "attend"):
            replay()
            _check(graphed, output, samples, limit, entrants)
        entrants.ready[graphed] = Timed(replay)


def captured_graph(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """The call as one CUDA graph; its output is written anew by each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


def _enter_contender(contender: Contender, problem: Problem, samples: list[Sample], entrants: Entrants) -> None:
    missing = contender.missing(problem.inputs.query.device)
    if missing is not None:
        entrants.refused[contender.name] = missing
        return
    with warnings.catch_warnings(record=True) as explained:
        warnings.simplefilter("always")
        try:
            with contender.setting():
                call = contender.build(problem)
                _check(contender.name, call(), samples, contender.max_relative_l1, entrants)
        except Exception as error:
            entrants.refused[contender.name] = _explained(error, explained)
        else:
            entrants.ready[contender.name] = Timed(call, contender.setting)
            if isinstance(call, Noted):
                entrants.notes[contender.name] = call.note


def _explained(error: Exception, warned: list[warnings.WarningMessage]) -> str:
    """torch says in warnings, not in the error, why a kernel does not take a call."""
    if isinstance(error, WrongResultError):
        return str(error)
    said = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in warned]
    hints = [text for text in dict.fromkeys(said) if " not used because" not in text and "disabled" not in text]
    return one_line(error) + (f" ({'; '.join(hints)[:300]})" if hints else "")


def _check(name: str, output: Tensor, samples: list[Sample], limit: float, entrants: Entrants) -> None:
    error = relative_l1(output, samples)
    entrants.errors[name] = error
    if not error <= limit:  # NaN fails too
        raise WrongResultError(f"wrong result ({name}): relative L1 {error:.3g}, bound {limit:g}")


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else number


def _timings(entrants: Entrants, taken: dict[str, float | str], base: str) -> tuple[Timing, ...]:
    order = (*OURS, *GRAPHED, *(contender.name for contender in CONTENDERS))
    base_time = taken.get(base)
    timings = []
    for name in order:
        result = taken.get(name, entrants.refused.get(name, ""))
        error = _finite(entrants.errors.get(name))
        if isinstance(result, str):
            timings.append(Timing(name, None, None, error, result))
        else:
            ratio = base_time / result if isinstance(base_time, float) else None
            timings.append(Timing(name, result, ratio, error, note=entrants.notes.get(name, "")))
    return tuple(timings)
