"""Runs Gluon kernels for sm_90 on a CPU, block by block of numbers, to test them where there is no GPU.

Triton's interpreter runs Triton kernels only. This one runs the source of Hopper's kernels with other meanings for
`gl` and its like: warps take turns, barriers and the copy engine behave as the chip's do (`machine`, `memory`), and
inline assembly is carried out instruction by instruction (`ptx`, `layouts`). It does not see what the compiler makes of
a kernel, nor whether threads of one warpgroup are in step.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from gluon_interpreter import language, machine

PACKAGE = "sparge.backends.hopper"
KERNELS = ("_powers", "_attend", "_attend_16bit", "_prepare", "_values", "_probe", "_select")
PROCESSORS = 3  # so that each program takes many tiles

STAND_INS = {
    "triton.experimental": SimpleNamespace(gluon=language.gluon),
    "triton.experimental.gluon": language.gluon,
    "triton.experimental.gluon.language.nvidia.hopper": language.hopper,
    "triton.language.core": SimpleNamespace(_aggregate=lambda cls: cls),
}


def _import(name: str, *args: Any) -> Any:
    return STAND_INS[name] if name in STAND_INS else builtins.__import__(name, *args)


def _load(name: str) -> ModuleType:
    """A kernel's module, from its source, with other meanings for what it imports."""
    full_name = f"{PACKAGE}.{name}"
    spec = importlib.util.find_spec(full_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    setattr(importlib.import_module(PACKAGE), name, module)
    return module


def install() -> None:
    """From here on Hopper's backend runs on this CPU. Its kernels may not have been imported before."""
    for name in KERNELS:
        _load(name)
    from sparge.backends.hopper import launch

    launch._processors = lambda device: PROCESSORS
    launch.HopperBackend.unavailable = lambda self: None


def begin_test() -> None:
    machine.chance.seed(0)
