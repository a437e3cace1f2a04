"""Samples of the trained models, as functions of a seed.

    python -m examples.train.sample runs/video/video.safetensors --seeds 6 --out samples.png
    python -m sparge eval-vision examples/train/sample.py:video --seeds 4 --loss video_loss --out results

The second line is run in the checkout, with weights in examples/train/weights and, for the losses, data in
examples/train/data. The seed decides the class, which is its remainder by their number, and all that is random.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from examples.train.data import Clips, DataError, read_clips
from examples.train.errors import said_plainly
from examples.train.flow import draw_times, flow_loss, generate
from examples.train.model import VideoTransformer, load_weights

HERE = Path(__file__).parent
SHOWN_FRAMES = 6
GIF_MILLISECONDS = 90


class Sampler:
    """sampler(seed) is a clip [frames, side, side, 3] from 0 to 1; sampler.loss(seed) a held-out flow loss."""

    def __init__(
        self, weights: Path, data: Path | None = None, device: str | None = None, order: str = "hilbert"
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, self.facts = load_weights(weights, order)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model: VideoTransformer = model.to(self.device, dtype).requires_grad_(False)
        self.name, self.classes = self.facts["recipe"], json.loads(self.facts["classes"])
        self.sampling = json.loads(self.facts["sampling"])
        self.data = data
        self.step: int | None = None  # of the sample that is being made

    def __call__(self, seed: int) -> Tensor:
        config = self.model.config
        shape = (1, config.frames, config.side, config.side, 3)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        label = torch.tensor([seed % config.classes], device=self.device)
        try:
            clip = generate(self.model, noise, label, **self.sampling, on_step=self._begin)
        finally:
            self.step = None
        return (clip[0] / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def loss(self, seed: int) -> float:
        """Of a held-out clip; the seed decides which, its noise and its time."""
        config = self.model.config
        windows = self.clips.windows(config.frames, held_out=True)
        batch = self.clips.fixed_batch(windows, [97 * seed], config.frames, config.side)
        draw = torch.Generator().manual_seed(seed)
        times = draw_times(1, self.sampling["shift"], draw).to(self.device)
        noise = torch.randn(batch.pixels.shape, generator=draw).to(self.device)
        return float(flow_loss(self.model, batch, times, noise, batch.labels))

    @property
    def clips(self) -> Clips:
        if self.data is None:
            raise DataError("a held-out loss needs the data that the model was trained on.")
        return _clips(self.data, self.device)

    def _begin(self, step: int) -> None:
        self.step = step


@lru_cache(maxsize=2)
def _clips(path: Path, device: torch.device) -> Clips:
    return read_clips(path, device)


# ---- for sparge eval-vision


@lru_cache(maxsize=2)
def _default(name: str) -> Sampler:
    return Sampler(HERE / "weights" / f"{name}.safetensors", HERE / "data" / f"{name}.safetensors")


def video(seed: int) -> Tensor:
    return _default("video")(seed)


def video_loss(seed: int) -> float:
    return _default("video").loss(seed)


def image(seed: int) -> Tensor:
    return _default("image")(seed)


def image_loss(seed: int) -> float:
    return _default("image").loss(seed)


# ---- to look at


def write_samples(sampler: Sampler, seeds: int, path: Path) -> list[Path]:
    """A clip a row, or all images in rows; of clips also a GIF, side by side."""
    clips = [(sampler(seed).cpu().numpy() * 255).round().astype(np.uint8) for seed in range(seeds)]
    if len(clips[0]) == 1:
        pictures = [clip[0] for clip in clips]
        columns = min(seeds, 8)
        pictures += [np.zeros_like(pictures[0])] * (-seeds % columns)
        rows = [np.concatenate(pictures[first : first + columns], axis=1) for first in range(0, seeds, columns)]
    else:
        shown = np.linspace(0, len(clips[0]) - 1, min(SHOWN_FRAMES, len(clips[0]))).round().astype(int)
        rows = [np.concatenate(list(clip[shown]), axis=1) for clip in clips]
    Image.fromarray(np.concatenate(rows)).save(path)
    if len(clips[0]) == 1:
        return [path]
    moving = path.with_suffix(".gif")
    first, *rest = (Image.fromarray(np.concatenate(frames, axis=1)) for frames in zip(*clips, strict=True))
    first.save(moving, save_all=True, append_images=rest, duration=GIF_MILLISECONDS, loop=0)
    return [path, moving]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("samples.png"))
    parser.add_argument("--device")
    options = parser.parse_args()
    sampler = Sampler(options.weights, device=options.device)
    print(f"Written: {', '.join(map(str, write_samples(sampler, options.seeds, options.out)))}")


if __name__ == "__main__":
    with said_plainly():
        main()
