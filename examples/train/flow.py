"""Rectified flow: a straight line from noise (time 0) to a clip (time 1), and a model that predicts its direction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from examples.train.data import Batch
from examples.train.model import VideoTransformer


def shifted(times: Tensor, shift: float) -> Tensor:
    """More of the times near the noise: neighbouring pixels say much about each other, so little noise hides little.

    >>> shifted(torch.tensor([0.0, 0.5, 1.0]), 3.0).tolist()
    [0.0, 0.25, 1.0]
    """
    return times / (times + shift * (1 - times))


def draw_times(count: int, shift: float, draw: torch.Generator) -> Tensor:
    """Most of them in the middle, where the direction is hardest to tell."""
    return shifted(torch.randn(count, generator=draw, device=draw.device).sigmoid(), shift)


def flow_loss(
    model: Callable[[Tensor, Tensor, Tensor], Tensor], batch: Batch, times: Tensor, noise: Tensor, labels: Tensor
) -> Tensor:
    """Mean squared error of the predicted direction."""
    share = times.view(-1, 1, 1, 1, 1)
    mixed = (1 - share) * noise + share * batch.pixels
    predicted = model(mixed, times, labels)
    return torch.nn.functional.mse_loss(predicted, batch.pixels - noise)


@torch.no_grad()
def generate(
    model: VideoTransformer,
    noise: Tensor,
    labels: Tensor,
    steps: int,
    guidance: float,
    shift: float,
    on_step: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """From noise to clips, by Euler's method; guidance 1 is none. on_step(number) is called before each step."""
    x, count = noise, len(noise)
    times = shifted(torch.linspace(0, 1, steps + 1, device=noise.device), shift)
    anything = torch.full_like(labels, model.config.classes)
    for number in range(steps):
        on_step(number)
        now = times[number].expand(count)
        if guidance == 1:
            direction = model(x, now, labels)
        else:
            twice = model(x.repeat(2, 1, 1, 1, 1), now.repeat(2), torch.cat([labels, anything]))
            wanted, any_class = twice.chunk(2)
            direction = any_class + guidance * (wanted - any_class)
        x = x + (times[number + 1] - times[number]) * direction
    return x
