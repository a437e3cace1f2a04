"""Images and video sampled from the same seeds, dense and sparse: how far apart they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparge.evaluate.statistics import Interval, mean_interval
from sparge.observe import observed

if TYPE_CHECKING:
    from sparge.api import Run

Frames = NDArray[np.float32]  # [frames, height, width, channels], from 0 to 1
Sparse = Callable[[], AbstractContextManager[Any]]  # as in lambda: sparge.patch(model)
SMALLEST_SIDE = 7  # of SSIM's window


class SampleError(ValueError):
    """Samples that cannot be compared; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a function of a seed gave, the seconds it took, and the blocks that sparge computed and could see."""

    output: Any
    seconds: float
    executed: int
    visible: int


@dataclass(frozen=True, eq=False)
class Pair:
    """One seed, both ways. The frames are there to be looked at."""

    seed: int
    squared_error: float
    ssim: float
    dense_seconds: float
    sparse_seconds: float
    executed: int  # blocks that sparge computed, of those it could see
    visible: int
    dense: Frames
    sparse: Frames

    @property
    def psnr(self) -> float | None:
        """Decibels; None where both are the same."""
        return psnr(self.squared_error)


@dataclass(frozen=True)
class LossGap:
    """A held-out loss, both ways, seed by seed."""

    dense: tuple[float, ...]
    sparse: tuple[float, ...]

    @property
    def change(self) -> float:
        """Mean difference."""
        return sum(b - a for a, b in zip(self.dense, self.sparse, strict=True)) / len(self.dense)

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean difference."""
        return mean_interval([b - a for a, b in zip(self.dense, self.sparse, strict=True)])


def compare_samples(
    sample: Callable[[int], Any],
    seeds: Iterable[int],
    ways: Mapping[str, Sparse],
    on_pair: Callable[[str, Pair], None] | None = None,
) -> dict[str, list[Pair]]:
    """sample(seed) as it is, and inside of each block that `ways` makes: a pair for every way and seed.

    sample   gives an image [height, width, channels] or frames [frames, height, width, channels], bytes or floats from
             0 to 1, as an array, a tensor, or a sequence of pictures; the seed must decide everything that is random
    ways     by name, what makes a sparse block: lambda: sparge.patched(), lambda: sparge.patch(model, config)
    on_pair  called as on_pair(way, pair) when one is done
    """
    pairs: dict[str, list[Pair]] = {way: [] for way in ways}
    for seed in seeds:
        dense = sampled(sample, seed)
        dense = replace(dense, output=as_frames(dense.output))  # what cannot be compared is told before more is sampled
        for way, block in ways.items():
            pair = paired(seed, dense, sampled(sample, seed, block))
            pairs[way].append(pair)
            if on_pair is not None:
                on_pair(way, pair)
    return pairs


def sampled(
    sample: Callable[[int], Any], seed: int, block: Sparse | None = None, on_run: Callable[[Run], None] | None = None
) -> Sampled:
    """sample(seed) as it is, or inside of a block that makes it sparse; on_run is called with each run of sparge."""
    with nullcontext() if block is None else block(), observed(on_run) as seen:
        start = now()
        output = sample(seed)
        seconds = now() - start
    if block is None and seen.visible:
        raise SampleError("the samples are sparse outside of the block too: unpatch the model first.")
    return Sampled(output, seconds, seen.executed, seen.visible)


def paired(seed: int, dense: Sampled, sparse: Sampled) -> Pair:
    """Both ways of one seed, compared."""
    first, second = as_frames(dense.output), as_frames(sparse.output)
    likeness = squared_error(first, second), ssim(first, second)
    return Pair(seed, *likeness, dense.seconds, sparse.seconds, sparse.executed, sparse.visible, first, second)


def compare_losses(loss: Callable[[int], Any], seeds: Iterable[int], ways: Mapping[str, Sparse]) -> dict[str, LossGap]:
    """loss(seed), such as a flow-matching loss whose data, noise and times the seed decides, likewise."""
    drawn = list(seeds)
    dense = tuple(float(loss(seed)) for seed in drawn)
    gaps = {}
    for way, block in ways.items():
        with block():
            gaps[way] = LossGap(dense, tuple(float(loss(seed)) for seed in drawn))
    return gaps


def as_frames(sampled: Any) -> Frames:
    """[frames, height, width, channels], from 0 to 1; an image is one frame."""
    if isinstance(sampled, torch.Tensor):
        sampled = sampled.detach().cpu()
        sampled = (sampled.float() if sampled.is_floating_point() else sampled).numpy()
    elif isinstance(sampled, Sequence):
        sampled = np.stack([np.asarray(picture) for picture in sampled])
    frames = np.asarray(sampled)
    frames = frames[None] if frames.ndim == 3 else frames
    if frames.ndim != 4 or frames.shape[-1] not in (1, 3) or min(frames.shape[1:3]) < SMALLEST_SIDE:
        raise SampleError(
            "a sample must be [height, width, channels] or [frames, height, width, channels] with 1 or 3 channels and "
            f"sides of {SMALLEST_SIDE} or more, not {list(np.shape(sampled))}."
        )
    if frames.dtype == np.uint8:
        return (frames / 255).astype(np.float32)
    if frames.dtype.kind != "f" or not np.isfinite(frames).all() or frames.min() < 0 or frames.max() > 1:
        raise SampleError(f"a sample must hold bytes, or floats from 0 to 1, not {frames.dtype} outside of that.")
    return frames.astype(np.float32)


def squared_error(first: Frames, second: Frames) -> float:
    """Mean over all pixels, channels and frames."""
    if first.shape != second.shape:
        raise SampleError(f"samples of one seed must have one shape, not {list(first.shape)} and {list(second.shape)}.")
    return float(np.square(first.astype(np.float64) - second).mean())


def psnr(error: float) -> float | None:
    """Decibels of a mean squared error of values from 0 to 1; None: no error.

    >>> psnr(0.01)
    20.0
    """
    return None if error == 0 else -10 * math.log10(error)


def ssim(first: Frames, second: Frames) -> float:
    """Structural similarity, the mean over the frames."""
    from skimage.metrics import structural_similarity

    each = [
        float(structural_similarity(a, b, channel_axis=-1, data_range=1.0)) for a, b in zip(first, second, strict=True)
    ]
    return sum(each) / len(each)


def now() -> float:
    """Seconds, with nothing left to do on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
