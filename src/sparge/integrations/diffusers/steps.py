"""Which denoising step a model is in, told from the timesteps that it is called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Steps:
    """Counts the steps of a run. Timesteps go one way, up or down, and a run is over when they start anew.

    Calls with the timestep of the last call are the same step (guidance often takes two). Reading a timestep waits for
    the device, so nobody counts unless some steps are to be dense, or masks to last for several.
    """

    def __init__(self, dense: int, mask_steps: int = 1) -> None:
        self.dense, self.mask_steps = dense, mask_steps
        self.step = -1
        self.call = 0  # of those with the same timestep
        self._first = self._last = self._way = 0.0

    def begin(self, timestep: Any) -> None:
        """A call with this timestep."""
        if self.dense or self.mask_steps > 1:
            self._advance(float(timestep.max() if isinstance(timestep, Tensor) else timestep))

    @property
    def is_dense(self) -> bool:
        """Whether the call belongs to the first steps, which are dense."""
        return 0 <= self.step < self.dense

    @property
    def chooses_masks(self) -> bool:
        """Whether masks are chosen anew in this step: in the first that is sparse, and in every so many after it."""
        return (self.step - self.dense) % self.mask_steps == 0

    def _advance(self, now: float) -> None:
        way = float(now > self._last) - float(now < self._last)
        anew = self.step < 0 or now == self._first or (self._way != 0 and way == -self._way)
        self.call = 0 if anew or way != 0 else self.call + 1
        if anew:
            self.step, self._first, self._way = 0, now, 0.0
        elif way != 0:
            self.step, self._way = self.step + 1, way
        self._last = now
