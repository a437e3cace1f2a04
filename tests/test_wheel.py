"""The wheel: pure Python, small, whole, and usable without any optional package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")
ROOT = Path(__file__).parent.parent
OPTIONAL = ("llvmlite", "triton", "typer", "rich", "transformers", "diffusers", "matplotlib", "gguf")
LARGEST = 1_000_000  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in this environment: a fresh one would have to be filled from a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_it_is_small_and_for_every_machine(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < LARGEST


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    mine = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "sparge").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert mine <= names
    assert {"sparge/py.typed", "sparge/report/page.html", "sparge/report/page.css", "sparge/report/page.js"} <= mine
    assert all(name.startswith("sparge/") or ".dist-info/" in name for name in names)


def test_its_only_needs_are_torch_numpy_and_safetensors(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        facts = Parser().parsestr(archive.read(name).decode())
    always = [need for need in facts.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need.split(">")[0] for need in always) == ["numpy", "safetensors", "torch"]
    assert {"cpu", "cli", "demo", "eval", "report", "docs"} <= set(facts.get_all("Provides-Extra", []))


def test_it_works_from_where_it_is_installed_without_optional_packages(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules.update(dict.fromkeys({OPTIONAL!r}));"
        f"import sparge, torch; assert sparge.__file__.startswith({str(tmp_path)!r}), sparge.__file__;"
        "x = torch.randn(1, 2, 300, 32); config = sparge.SparseConfig(quantization='none');"
        "assert sparge.attention(x, x, x, is_causal=True, config=config).shape == x.shape"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
