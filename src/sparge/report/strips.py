"""Samples both ways as small pictures that a page can hold."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparge.evaluate.frames import Bytes, as_bytes, shown_frames
from sparge.evaluate.vision import Frames, Pair

SHOWN_SEEDS = 4
LOWEST, HIGHEST = 96, 192  # pixels of a frame's height
QUALITY = 90  # of JPEG
STRONGER = 4  # so much the difference is


def strips(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For each of the first seeds: frames side by side, dense, sparse, and the difference, four times as strong."""
    shown = []
    for pair in pairs[:SHOWN_SEEDS]:
        rows = {"dense": pair.dense, "sparse": pair.sparse, "difference": STRONGER * np.abs(pair.dense - pair.sparse)}
        strips = {name: _strip(frames) for name, frames in rows.items()}
        shown.append({"seed": pair.seed, "psnr": pair.psnr, "ssim": pair.ssim, "strips": strips})
    return shown


def _strip(frames: Frames) -> str:
    from PIL import Image

    pictures = [_sized(Image.fromarray(frame)) for frame in as_bytes(frames)[shown_frames(len(frames))]]
    file = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, axis=1)).save(file, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _sized(picture: Any) -> Bytes:
    """Large ones smaller; small ones a whole number of times larger, so that their pixels stay what they are."""
    from PIL import Image

    width, height = picture.size
    if height > HIGHEST:
        picture = picture.resize((max(1, round(width * HIGHEST / height)), HIGHEST), Image.Resampling.LANCZOS)
    elif height < LOWEST:
        larger = -(-LOWEST // height)
        picture = picture.resize((width * larger, height * larger), Image.Resampling.NEAREST)
    sized: Bytes = np.asarray(picture, dtype=np.uint8)
    return sized
