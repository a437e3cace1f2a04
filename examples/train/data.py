"""Frames in one file: the clips of a video, or images, which are clips of one frame.

The frames are JPEG bytes, so that thousands of them make a small file; read, they are one tensor of bytes that stays
on the device. A batch is drawn there: windows of consecutive frames, cropped and mirrored at random.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from examples.train.errors import ExampleError

FORMAT = "sparge-example-clips"
JPEG_QUALITY = 90


class DataError(ExampleError):
    """A file that holds no clips, or not those that are needed; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class Clip:
    """Consecutive frames of one class."""

    frames: NDArray[np.uint8]  # [frames, side, side, 3]
    label: int
    held_out: bool  # never trained on


@dataclass(frozen=True, eq=False)
class Clips:
    """All clips of a file, their frames one after the other."""

    frames: Tensor  # uint8 [all frames, side, side, 3], on the device that batches are made on
    lengths: Tensor  # of each clip, in frames
    labels: Tensor
    held_out: Tensor
    classes: tuple[str, ...]
    source: str

    def windows(self, frames: int, held_out: bool) -> Tensor:
        """[windows, 2]: the first frame and the label of all stretches of so many frames."""
        starts = self.lengths.cumsum(0) - self.lengths
        found = [
            torch.tensor([(start + shift, label) for shift in range(length - frames + 1)], dtype=torch.long)
            for start, length, label, kept in zip(
                starts.tolist(), self.lengths.tolist(), self.labels.tolist(), self.held_out.tolist(), strict=True
            )
            if kept == held_out and length >= frames
        ]
        if not found:
            kind = "held-out clip" if held_out else "clip"
            raise DataError(f"the file has no {kind} of {frames} frames or more.")
        return torch.cat(found)

    def training_batch(self, windows: Tensor, count: int, frames: int, side: int, draw: torch.Generator) -> Batch:
        """Windows drawn with `draw`, on the CPU, each cropped at its own place and mirrored or not."""
        spare = self._spare(side)
        chosen = windows[torch.randint(len(windows), (count,), generator=draw)]
        top, left = torch.randint(spare + 1, (2, count), generator=draw)
        mirrored = torch.rand(count, generator=draw) < 0.5
        return self._cut(chosen, frames, side, top, left, mirrored)

    def fixed_batch(self, windows: Tensor, numbers: Sequence[int], frames: int, side: int) -> Batch:
        """The windows of these numbers, from the middle of their frames."""
        chosen = windows[torch.tensor([number % len(windows) for number in numbers])]
        middle = torch.full((len(numbers),), self._spare(side) // 2)
        return self._cut(chosen, frames, side, middle, middle, torch.zeros(len(numbers), dtype=torch.bool))

    def _spare(self, side: int) -> int:
        spare = self.frames.shape[1] - side
        if spare < 0:
            raise DataError(f"the frames have sides of {self.frames.shape[1]}, less than the {side} of the model.")
        return spare

    def _cut(self, chosen: Tensor, frames: int, side: int, top: Tensor, left: Tensor, mirrored: Tensor) -> Batch:
        times = chosen[:, :1] + torch.arange(frames)
        rows = top[:, None] + torch.arange(side)
        columns = left[:, None] + torch.where(mirrored[:, None], torch.arange(side - 1, -1, -1), torch.arange(side))
        places = (times[:, :, None, None], rows[:, None, :, None], columns[:, None, None, :])
        device = self.frames.device
        pixels = self.frames[tuple(place.to(device) for place in places)]
        return Batch(pixels.float() / 127.5 - 1, chosen[:, 1].to(device))


@dataclass(frozen=True, eq=False)
class Batch:
    """pixels [batch, frames, side, side, 3] from -1 to 1, labels [batch]."""

    pixels: Tensor
    labels: Tensor


def write_clips(path: Path, clips: Sequence[Clip], classes: Sequence[str], source: str) -> None:
    encoded = [_encoded(frame) for clip in clips for frame in clip.frames]
    tensors = {
        "jpeg": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        "jpeg_bytes": torch.tensor([len(one) for one in encoded]),
        "lengths": torch.tensor([len(clip.frames) for clip in clips]),
        "labels": torch.tensor([clip.label for clip in clips]),
        "held_out": torch.tensor([clip.held_out for clip in clips]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"format": FORMAT, "classes": json.dumps(list(classes)), "source": source}
    save_file(tensors, path, metadata=facts)


def read_clips(path: Path, device: torch.device | str = "cpu") -> Clips:
    if not path.is_file():
        raise DataError(f"there is no data in {path}: make it with python -m examples.train.prepare.")
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise DataError(f"{path} was not written by python -m examples.train.prepare.")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    jpeg, ends = tensors["jpeg"].numpy(), tensors["jpeg_bytes"].cumsum(0).tolist()
    frames = [_decoded(jpeg[start:end].tobytes()) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return Clips(
        torch.from_numpy(np.stack(frames)).to(device),
        tensors["lengths"],
        tensors["labels"],
        tensors["held_out"],
        tuple(json.loads(facts["classes"])),
        facts["source"],
    )


def _encoded(frame: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _decoded(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))
