"""Medians: by Triton's do_bench on a GPU, by turns on a CPU; and the peak memory of a call."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CPU_TURNS = 3
GPU_WARM_UP, GPU_TIMED = 200, 300  # milliseconds: a GPU takes some of them to find the clock that its power allows


@dataclass(frozen=True)
class Timed:
    """A call, and what is entered around it outside its time."""

    call: Callable[[], object]
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext


def medians(actions: dict[str, Timed], device: torch.device) -> dict[str, float | str]:
    """Milliseconds of each action, or in one line why it failed."""
    return _gpu_medians(actions) if device.type == "cuda" else _cpu_medians(actions)


def one_line(error: Exception) -> str:
    """The first line of an error, with its kind."""
    first = next(iter(str(error).strip().splitlines()), "no message")
    return f"{type(error).__name__}: {first[:200]}"


def _gpu_medians(actions: dict[str, Timed]) -> dict[str, float | str]:
    """Each action alone, at the clock it settles at: heavier ones lower it for those that come after."""
    from triton.testing import do_bench

    taken: dict[str, float | str] = {}
    for name, action in actions.items():
        try:
            with action.setting():
                taken[name] = float(do_bench(action.call, GPU_WARM_UP, GPU_TIMED, return_mode="median"))
        except Exception as error:
            taken[name] = one_line(error)
    return taken


def _cpu_medians(actions: dict[str, Timed]) -> dict[str, float | str]:
    """The actions take turns, so that drift of the machine meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    failed: dict[str, str] = {}
    for _ in range(CPU_TURNS):
        for name, action in actions.items():
            if name in failed:
                continue
            try:
                with action.setting():
                    start = time.perf_counter()
                    action.call()
                    taken[name].append(time.perf_counter() - start)
            except Exception as error:
                failed[name] = one_line(error)
    return {name: failed.get(name) or 1e3 * sorted(taken[name])[CPU_TURNS // 2] for name in actions}


def extra_memory(call: Callable[[], Tensor], tensors: tuple[Tensor, ...]) -> float | None:
    """Peak memory of a call beyond its inputs and output, as a share of them; None where it is not known."""
    peak = _gpu_peak(call) if tensors[0].is_cuda else _cpu_peak(call)
    if peak is None:
        return None
    beyond, output = peak
    total = output + sum(x.numel() * x.element_size() for x in tensors)
    return max(0.0, float(beyond - output)) / total


def _gpu_peak(call: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes at the peak beyond those before, and those of the output."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, output.numel() * output.element_size()


def _cpu_peak(call: Callable[[], Tensor]) -> tuple[int, int] | None:
    """By the kernel's own account, which only Linux keeps."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def kilobytes(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory kept from earlier calls would hide this one's
        clear.write_text("5")  # resets the peak
    except (OSError, AttributeError):  # not permitted, or not glibc
        return None
    before = kilobytes("VmRSS")
    output = call()
    return (kilobytes("VmHWM") - before) * 1024, output.numel() * output.element_size()
