"""Programs and their warps, one at a time, as chance decides: whoever waits for what never comes is found.

Copies arrive, and products are computed, as late as they may; until then what they write is garbage. So whoever reads
too early, or lets a stage be filled that is still read, gets a wrong result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from greenlet import getcurrent, greenlet

from gluon_interpreter.memory import Barrier, Boxes, SharedMemory
from gluon_interpreter.values import Value

chance = random.Random(0)


class DeadlockError(Exception):
    """Everybody waits."""


class Product:
    """One that is under way."""

    def __init__(self, a: Any, b: SharedMemory, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        start = acc.start if isinstance(acc, Product) else acc
        self.start: Value = start
        self.result: Value | None = None

    def finish(self) -> None:
        left, right = self.a.data.astype(np.float64), self.b.data.astype(np.float64)
        with np.errstate(all="ignore"):
            product = left @ right  # rounded once, so that no order of adding up shows
            if self.use_acc:
                before = self.acc.result if isinstance(self.acc, Product) else self.acc
                product = product + before.data
            self.result = Value(product, self.start.dtype, self.start.layout)


class Warps(greenlet):
    """Those of one task of a program."""

    def __init__(self, run: Callable[[], Any], machine: Machine, program: int) -> None:
        super().__init__(run, machine.scheduler)
        self.machine, self.program = machine, program
        self.waits_for: Callable[[], bool] | None = None
        self.what = ""
        self.products: list[Product] = []


class Machine:
    def __init__(self) -> None:
        self.scheduler = getcurrent()
        self.tasks: list[Warps] = []
        self.copies: list[Callable[[], None]] = []
        self.programs = 0

    def run(self, kernel: Callable[[], Any], programs: int) -> None:
        self.programs = programs
        self.tasks = [Warps(kernel, self, n) for n in range(programs)]
        while self.tasks:
            able = [task for task in self.tasks if task.waits_for is None or task.waits_for()]
            choice = chance.randrange(len(able) + bool(self.copies)) if able or self.copies else -1
            if choice < 0:
                waiting = sorted({f"program {task.program}: {task.what}" for task in self.tasks})
                raise DeadlockError("; ".join(waiting))
            if choice == len(able):
                self.copies.pop(chance.randrange(len(self.copies)))()
                continue
            task = able[choice]
            task.waits_for = None
            task.switch()
            if task.dead:
                assert not task.products, "products that nobody waited for"
                self.tasks.remove(task)
        assert not self.copies, "copies that nobody waited for"


def own() -> Warps:
    current = getcurrent()
    assert isinstance(current, Warps)
    return current


def wait_until(done: Callable[[], bool], what: str) -> None:
    task = own()
    task.waits_for, task.what = done, what
    task.machine.scheduler.switch()


def let_others_run() -> None:
    wait_until(lambda: True, "its turn")


def specialize(
    tasks: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: Sequence[int], _: Sequence[int]
) -> None:
    """Each function by warps of its own, until all are through."""
    assert len(warps) == len(tasks) - 1
    mine, machine = own(), own().machine
    others = [Warps(lambda run=run, given=given: run(*given), machine, mine.program) for run, given in tasks]
    machine.tasks += others
    wait_until(lambda: all(task.dead for task in others), "its warps")


def fetch(boxes: Boxes, corner: list[int], barrier: Barrier, target: SharedMemory) -> None:
    target.spoil()

    def arrives() -> None:
        boxes.fetch(corner, target)
        barrier.complete(boxes.bytes())

    own().machine.copies.append(arrives)


def multiply(a: Any, b: SharedMemory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    task = own()
    made = Product(a, b, acc, use_acc)
    assert a.shape[1] == b.shape[0], f"{a.shape} times {b.shape}"
    assert (a.shape[0], b.shape[1]) == made.start.shape
    assert made.start.dtype in (tl.float32, tl.int32)
    task.products.append(made)
    return made


def wait_for_products(outstanding: int, deps: Sequence[Any]) -> Any:
    """All but the last `outstanding` are computed; the others stay under way."""
    task = own()
    if chance.random() < 0.5:
        let_others_run()
    due = max(len(task.products) - outstanding, 0)
    for product in task.products[:due]:
        product.finish()
    del task.products[:due]
    assert not any(x in task.products for x in deps), "a product is read that is under way"
    found = tuple(x.result if isinstance(x, Product) else x for x in deps)
    return found[0] if len(found) == 1 else found
