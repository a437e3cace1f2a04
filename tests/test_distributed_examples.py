"""Every example of context parallelism is short, and runs in two processes as its first line says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
RUNS = {
    "context_parallel.py ring": ("ring: ", "keys and values"),
    "context_parallel_model.py": ("logits of 600 tokens, error ",),
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("context_parallel*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_is_run_here(path):
    assert len(path.read_text().splitlines()) < 40
    assert any(run.startswith(path.name) for run in RUNS)
    assert path.name in path.read_text().splitlines()[0]


@pytest.mark.parametrize("run", RUNS)
def test_an_example_runs(run):
    if "model" in run:
        pytest.importorskip("transformers")
    name, *arguments = run.split()
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(FOLDER / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in RUNS[run]:
        assert words in done.stdout
    error = float(done.stdout.partition("error ")[2].split()[0])
    assert error < 5e-5
