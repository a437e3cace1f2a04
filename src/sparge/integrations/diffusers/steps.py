"""Which denoising step a model is in, told from the timesteps that it is called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Steps:
    """Counts the steps of a run. Timesteps go one way, up or down, and a run is over when they start anew.

    Calls with the timestep of the last call are the same step (guidance often takes two). Reading a timestep waits for
    the device, so nobody counts unless some steps are to be dense.
    """

    def __init__(self, dense: int) -> None:
        self.dense = dense
        self.step = -1
        self._first = self._last = self._way = 0.0

    def is_dense(self, timestep: Any) -> bool:
        """Whether the call with this timestep belongs to the first steps, which are dense."""
        if self.dense == 0:
            return False
        self._advance(float(timestep.max() if isinstance(timestep, Tensor) else timestep))
        return self.step < self.dense

    def _advance(self, now: float) -> None:
        way = float(now > self._last) - float(now < self._last)
        anew = self.step < 0 or now == self._first or (self._way != 0 and way == -self._way)
        if anew:
            self.step, self._first, self._way = 0, now, 0.0
        elif way != 0:
            self.step, self._way = self.step + 1, way
        self._last = now
