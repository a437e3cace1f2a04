"""Runs a function in several processes that talk by gloo, and collects what each returns or raises."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 240  # seconds that a test waits for all ranks together


def run_ranks(work, world: int, *arguments, timeout: float = 60.0, expect_deaths: int = 0) -> dict[int, object]:
    """work(rank, world, *arguments) in `world` processes: what each returned, by rank. An exception comes as its text.

    A rank that dies without a word has no entry; more deaths than expected, or silence, are an error.
    """
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "ranks"
        started = [
            context.Process(target=_rank, args=(work, rank, world, meeting, timeout, answers, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in started:
            process.start()
        try:
            found = _collect(started, answers, world - expect_deaths)
            for rank in found:
                started[rank].join(30)
                assert started[rank].exitcode is not None, f"rank {rank} answered, but does not end"
            return found
        finally:
            for process in started:
                process.kill()
                process.join()


def _collect(started, answers, wanted: int) -> dict[int, object]:
    found: dict[int, object] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < wanted:
        if not answers.empty():
            rank, answer = answers.get()
            found[rank] = answer
        elif time.monotonic() > deadline or not any(process.is_alive() for process in started):
            raise AssertionError(f"only ranks {sorted(found)} answered")
        else:
            time.sleep(0.05)
    return found


def _rank(work, rank, world, meeting, timeout, answers, arguments) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        answer = work(rank, world, *arguments)
    except Exception as error:  # whatever it is, the test shall see it
        answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    answers.put((rank, answer))
    if "Contact" not in str(answer):
        dist.destroy_process_group()
