"""Starts kernels with little work on the host.

Triton binds, inspects and hashes every argument on every launch, some 70 microseconds for a kernel with dozens of them:
more than short attention takes. A Launch belongs to one problem, whose sizes, types and alignments never change; it
remembers the compiled kernel, and passes addresses and numbers straight to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparge.replay import Given, note_launch, tensors_of

MOST_KNOWN = 256  # descriptors of one launch


class Launch:
    """kernel[(programs,)](*tensors, *numbers, **constants), for tensors of one problem."""

    def __init__(self, kernel: Any, programs: int, numbers: Sequence[float], constants: dict[str, Any]) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, tuple(numbers), constants
        self._start: Any = None
        self._tail: tuple[Any, ...] = ()

    def __call__(self, given: Given, addresses: Sequence[Any]) -> None:
        """On the current device and stream. `addresses` are the tensors', looked up once for several launches; tensors
        that are made when asked for are asked for at the first."""
        note_launch(self._start, given, addresses, self._tail)
        if self._start is not None:
            self._start(*addresses, *self._tail)
            return
        tensors = tensors_of(given)
        compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._tail = (*self.numbers, *(self.constants[name] for name in names))
            self._start = _starter(compiled, self.programs, tensors)


def _starter(compiled: Any, programs: int, tensors: Sequence[Any]) -> Callable[..., None]:
    """What starts a compiled kernel, without a word to Triton's profiling hooks unless one is set."""
    from triton import knobs

    announced, device = compiled[programs, 1, 1], next(x.device for x in tensors if isinstance(x, Tensor))
    stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent where torch has no CUDA
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if stream_of is None or device.type != "cuda" or not all(hasattr(hook, "calls") for hook in hooks):
        return announced  # type: ignore[no-any-return]
    run, function, metadata, index = compiled.run, compiled.function, compiled.packed_metadata, device.index
    expanding = _Expanding.of(run)

    def start(*args: Any) -> None:
        if hooks[0].calls or hooks[1].calls:
            announced(*args)
        elif expanding is not None:
            expanding(programs, stream_of(index), function, metadata, args)
        else:
            run(programs, 1, 1, stream_of(index), function, metadata, None, None, None, *args)

    return start


class _Expanding:
    """Passes a kernel what Triton makes of its TMA descriptors, which it would make anew at each launch.

    That takes the host as long as the launch itself. A launch's descriptors differ in their address alone, so they are
    remembered by it. How a kernel is started differs between releases; `PassOn` does it as each of them would.
    """

    def __init__(self, pass_on: PassOn, expand: Callable[[Any, Any], list[Any]], kinds: dict[int, Any]):
        self.pass_on, self.expand, self.kinds = pass_on, expand, kinds
        self.known: dict[tuple[int, int], list[Any]] = {}

    @classmethod
    def of(cls, run: Any) -> _Expanding | None:
        """None where the kernel has no descriptors, needs more than arguments, or is launched in an unknown way."""
        wrapped = getattr(run, "launch", None)
        scratch = [getattr(run, f"{name}_scratch_size", 1) for name in ("global", "profile")]
        special = [getattr(run, name, True) for name in ("launch_cooperative_grid", "launch_pdl")]
        if any(scratch) or any(special) or getattr(run, "gsan_enabled", False) or not inspect.isfunction(wrapped):
            return None
        inside, outside = (getattr(inspect.getclosurevars(wrapped), x) for x in ("nonlocals", "globals"))
        if inside.keys() == {"launcher", "tensordesc_indices", "tensordesc_meta"}:  # Triton 3.6 and 3.7
            places, make = inside["tensordesc_indices"], outside["make_tensordesc_arg"]
        elif inside.keys() == {"launcher", "make_tensordesc_arg", "relevant_paths", "signature", "tensordesc_meta"}:
            places, make_for = inside["relevant_paths"], inside["make_tensordesc_arg"]

            def make(descriptor: Any, kind: Any) -> list[Any]:
                return make_for(descriptor, kind, None)  # type: ignore[no-any-return]
        else:
            return None
        kinds = dict(zip(sorted(places), inside["tensordesc_meta"], strict=True))
        return cls(_passing_on(run, inside["launcher"]), make, kinds)

    def __call__(self, programs: int, stream: int, function: Any, metadata: Any, args: Sequence[Any]) -> None:
        passed: list[Any] = []
        done = 0
        for n in self.kinds:
            passed += args[done:n]
            passed += self.expanded(n, args[n])
            done = n + 1
        passed += args[done:]
        self.pass_on(programs, stream, function, metadata, passed)

    def expanded(self, n: int, descriptor: Any) -> list[Any]:
        place = (n, descriptor.base.data_ptr())
        found = self.known.get(place)
        if found is None:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            found = self.known[place] = self.expand(descriptor, self.kinds[n])
        return found


PassOn = Callable[[int, int, Any, Any, list[Any]], None]  # programs, stream, function, metadata, arguments


def _passing_on(run: Any, launcher: Callable[..., None]) -> PassOn:
    """Starts a kernel that is neither cooperative nor dependent, without scratch and hooks."""
    if not hasattr(run, "kernel_signature"):  # Triton 3.6

        def pass_on(programs: int, stream: int, function: Any, metadata: Any, passed: list[Any]) -> None:
            launcher(programs, 1, 1, stream, function, False, False, None, None, metadata, None, None, None, *passed)

        return pass_on
    after = (None, None, None, None, None, run.arg_annotations, run.kernel_signature)  # metadata, hooks, scratch

    def pass_on_together(programs: int, stream: int, function: Any, metadata: Any, passed: list[Any]) -> None:
        launcher(programs, 1, 1, stream, function, False, False, metadata, *after, passed)

    return pass_on_together


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]
