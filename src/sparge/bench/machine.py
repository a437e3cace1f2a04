"""The machine and the versions that a result belongs to, and the chips whose peak is known."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparge import __version__


class Peak(NamedTuple):
    """Dense tensor-core TFLOPS by the datasheet."""

    bits8: float
    bits16: float


def peak(chip: str) -> Peak | None:
    """None for chips not listed; the PCIe and NVL boards of the same name are slower."""
    hopper = ("H100" in chip or "H200" in chip) and "PCIe" not in chip and "NVL" not in chip
    return Peak(1979, 989) if hopper else None


def hardware(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    facts["isa"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        facts["gpu"] = chip.name
        facts["compute_capability"] = f"{chip.major}.{chip.minor}"
        facts["multiprocessors"] = chip.multi_processor_count
        facts["gpu_memory_gib"] = round(chip.total_memory / 2**30, 1)
    return facts


def versions() -> dict[str, str | None]:
    """None: not installed, or not known."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    packages = {name: version_of(name) for name in ("triton", "llvmlite", "sageattention")}
    return {
        "sparge": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **packages,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": _driver(),
    }


def version_of(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
