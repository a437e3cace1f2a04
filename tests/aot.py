"""Compiles the kernels a call would launch, for any NVIDIA architecture, on a machine without a GPU."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

BUILT: dict[str, Resources] = {}  # of this run: tests share kernels
SHARED_MEMORY_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB one program may use


@dataclass(frozen=True)
class Resources:
    """What the assembler says of one kernel."""

    kernel: str
    arch: int
    shared_bytes: int
    spill_bytes: int
    registers: int
    serialized: bool  # asynchronous products that the assembler makes wait for each other
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def spills_in_loops(self, *instructions: str) -> list[int]:
        """Stores and loads of spilled registers in each innermost loop that holds all these machine instructions, the
        shortest loop first."""
        lines = self._disassembled()
        label = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\.(L_x_\d+):", line))}
        # A loop ends in a conditional branch; unconditional ones lead back from barriers that had to be waited for.
        ends = ((at, re.search(r"@!?U?P\d+ BRA.*`\(\.(L_x_\d+)\)", line)) for at, line in enumerate(lines))
        loops = [(label[end[1]], at) for at, end in ends if end and label.get(end[1], at) < at]
        holding = [loop for loop in loops if all(any(i in x for x in lines[slice(*loop)]) for i in instructions)]
        innermost = [a for a in holding if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in holding)]
        innermost.sort(key=lambda loop: loop[1] - loop[0])
        return [_spills(lines[slice(*loop)]) for loop in innermost]

    def spills_among(self, instruction: str) -> int:
        """The same from the first to the last of a machine instruction that only one loop holds."""
        lines = self._disassembled()
        places = [at for at, line in enumerate(lines) if instruction in line]
        return _spills(lines[places[0] : places[-1]])

    def _disassembled(self) -> list[str]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            disassemble = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            return subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout.splitlines()


def _spills(lines: list[str]) -> int:
    return sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in lines)


def compile_kernel(kernel: JITFunction, args: tuple[object, ...], kwargs: dict[str, object], arch: int) -> Resources:
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    kwargs = {"debug": False, "sanitize_overflow": False, "instrumentation_mode": "", **kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constants, attributes)
    key = f"{source.hash()} {arch} {sorted(options.__dict__.items(), key=str)}"
    if key not in BUILT:
        BUILT[key] = _built(kernel.__name__, source, options, target)
    return BUILT[key]


def _built(name: str, source: ASTSource, options: object, target: GPUTarget) -> Resources:
    said = io.StringIO()  # what ptxas says, with the options that Triton gives it
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=target, options=options.__dict__)
    report = said.getvalue()
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", report)))
    ptx, serialized = compiled.asm["ptx"], "instructions are serialized" in report
    return Resources(
        name, target.arch, compiled.metadata.shared, spills, registers, serialized, ptx, compiled.asm["cubin"]
    )


@contextmanager
def recorded_launches(launches: list[tuple[JITFunction, tuple[object, ...], dict[str, object]]]) -> Iterator[None]:
    """Kernel launches inside are noted, not run."""

    def note(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        launches.append((self, args, kwargs))

    original, JITFunction.run = JITFunction.run, note
    try:
        yield
    finally:
        JITFunction.run = original
