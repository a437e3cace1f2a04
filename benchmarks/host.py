"""What a call on an H200 takes the host, on a machine without a GPU: its launches are replaced by nothing.

    python benchmarks/host.py --tokens 4096

Two ways are timed in turns: the whole way of a call (allocations, views, descriptors, addresses of each launch), and
its replay, which later calls of a kind take. What Triton and the driver add for each launch is not in here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import sparge
from sparge import backends, calls
from sparge.backends.hopper import launch
from sparge.backends.hopper.launch import HopperBackend
from sparge.backends.triton.dispatch import Launch
from sparge.replay import Given, note_launch

RUNS, CALLS = 9, 500


class OnNoGpu(HopperBackend):
    """Takes tensors of this machine."""

    def unavailable(self) -> None:
        return None

    def unsupported(self, *_: Any) -> None:
        return None

    def default_quantization(self, device: torch.device) -> str:
        return "int8-fp8"


def leave_launches_out() -> None:
    def start(*_: Any) -> None:
        pass

    def leave_out(self: Launch, given: Given, addresses: Sequence[Any]) -> None:
        note_launch(self._start, given, addresses, self._tail)
        self._start, self._tail = start, (*self.numbers, *self.constants.values())
        start(*addresses, *self._tail)

    Launch.__call__ = leave_out  # type: ignore[method-assign]
    launch._processors = lambda device: 132  # type: ignore[assignment]
    backends.BACKENDS = (OnNoGpu(),)


def microseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--causal", action="store_true")
    arguments = parser.parse_args()
    leave_launches_out()
    torch.set_num_threads(1)
    q, k, v = (torch.empty(1, 32, arguments.tokens, 128, dtype=torch.bfloat16) for _ in range(3))
    for _ in range(2):
        sparge.attention(q, k, v, is_causal=arguments.causal)
    (known,) = calls._known.values()
    replay = known.replay
    assert replay is not None
    times: dict[str, list[float]] = {"whole way": [], "replay": []}
    for _ in range(RUNS):
        for way, known.replay in (("whole way", None), ("replay", replay)):
            times[way].append(microseconds(lambda: sparge.attention(q, k, v, is_causal=arguments.causal)))
    for way, taken in times.items():
        print(f"{way}: {statistics.median(taken):.1f} microseconds a call ({min(taken):.1f} at best)")
    print(f"{len(replay.launches)} launches, {len(replay.places)} places, {replay.bytes / 2**20:.0f} MiB at once")


if __name__ == "__main__":
    main()
