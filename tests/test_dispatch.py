"""A Launch calls Triton once, then the compiled kernel, with the same arguments in the same order."""

from __future__ import annotations

import torch

from sparge.backends.triton.dispatch import Launch, addresses_of


class Kernel:
    """Stands for a Triton kernel: notes how it was started."""

    arg_names = ("A", "B", "n", "stride", "D", "MODE")

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.bound, self.started = compiles, [], []

    def __getitem__(self, grid):
        def bind(*args, **constants):
            self.bound.append((grid, args, constants))
            return Compiled(self) if self.compiles else None

        return bind


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.started.append((grid, args))


def test_the_second_call_passes_addresses_numbers_and_constants_straight():
    kernel = Kernel(compiles=True)
    launch = Launch(kernel, 7, (5, 2), {"num_warps": 4, "MODE": 1, "D": 64})  # options are no arguments
    first, second = [torch.zeros(3), torch.ones(3)], [torch.zeros(4), torch.ones(4)]
    launch(first, addresses_of(first))
    assert kernel.bound == [((7,), (*first, 5, 2), {"num_warps": 4, "MODE": 1, "D": 64})]
    launch(second, addresses_of(second))
    assert len(kernel.bound) == 1
    assert kernel.started == [((7, 1, 1), (*addresses_of(second), 5, 2, 64, 1))]


def test_without_a_compiler_every_call_goes_through_triton():
    kernel = Kernel(compiles=False)
    launch = Launch(kernel, 1, (5, 2), {"D": 64, "MODE": 1})
    for _ in range(2):
        launch([torch.zeros(1)] * 2, [0, 0])
    assert len(kernel.bound) == 2
    assert not kernel.started
