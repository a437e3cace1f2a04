"""Frames to look at: a contact sheet of every seed both ways, and both ways side by side as GIF or MP4."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparge.evaluate.vision import Frames, Pair

SHOWN_FRAMES = 6  # of a video, in the contact sheet
LABEL, GAP = 14, 4  # pixels
VIDEOS = ("gif", "mp4")

Bytes = NDArray[np.uint8]


def contact_sheet(pairs: Sequence[Pair], path: Path) -> None:
    """For each seed a row of dense frames, one of sparse frames, and one of their differences, four times as strong.

    Seeds of single images stand side by side, others below each other.
    """
    from PIL import Image

    seeds = []
    for pair in pairs:
        rows = []
        shown = shown_frames(len(pair.dense))
        apart = np.abs(pair.dense - pair.sparse)
        decibels = "equal" if pair.psnr is None else f"{pair.psnr:.1f} dB"
        for name, frames in (
            ("dense", pair.dense),
            (f"sparse, {decibels}", pair.sparse),
            ("4 x difference", apart * 4),
        ):
            rows.append(_labelled(f"seed {pair.seed}, {name}", np.concatenate(list(as_bytes(frames)[shown]), axis=1)))
        seeds.append(_stacked(rows))
    columns = SHOWN_FRAMES if len(pairs[0].dense) == 1 else 1
    sheet = [np.concatenate(seeds[first : first + columns], axis=1) for first in range(0, len(seeds), columns)]
    Image.fromarray(_stacked(sheet)).save(path)


def shown_frames(count: int) -> NDArray[np.int64]:
    """Which frames stand for a video."""
    places: NDArray[np.int64] = np.linspace(0, count - 1, min(SHOWN_FRAMES, count)).round().astype(np.int64)
    return places


def side_by_side(pair: Pair, path: Path, fps: int) -> None:
    """The dense frames on the left, the sparse ones on the right; .gif or .mp4 by the name of the file."""
    both = np.concatenate([as_bytes(pair.dense), as_bytes(pair.sparse)], axis=2)
    frames = [_labelled(f"seed {pair.seed}: dense | sparse", frame) for frame in both]
    if path.suffix == ".mp4":
        _write_mp4(frames, path, fps)
    elif path.suffix == ".gif":
        _write_gif(frames, path, fps)
    else:
        raise ValueError(f"a video is written as {' or '.join(VIDEOS)}, not as {path.name}.")


def check_video(kind: str) -> None:
    """Raise unless videos of this kind can be written here."""
    if kind not in VIDEOS:
        raise ValueError(f"--video must be {' or '.join(VIDEOS)}, not {kind}.")
    if kind == "mp4" and any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise ImportError("MP4 files need imageio and imageio-ffmpeg: pip install 'sparge[eval]', or take gif.")


def _write_gif(frames: Sequence[Bytes], path: Path, fps: int) -> None:
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)


def _write_mp4(frames: Sequence[Bytes], path: Path, fps: int) -> None:
    check_video("mp4")
    import imageio.v2 as imageio

    height, width = (side - side % 2 for side in frames[0].shape[:2])  # the codec takes even sides only
    imageio.mimwrite(path, [frame[:height, :width] for frame in frames], fps=fps, macro_block_size=2)


def as_bytes(frames: Frames) -> Bytes:
    """With three channels."""
    shown: Bytes = (np.clip(frames, 0, 1) * 255).round().astype(np.uint8)
    return np.repeat(shown, 3, axis=-1) if shown.shape[-1] == 1 else shown


def _labelled(text: str, picture: Bytes) -> Bytes:
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (picture.shape[1], LABEL), "white")
    ImageDraw.Draw(strip).text((2, 1), text, fill="black")
    return np.concatenate([_array(strip), picture])


def _array(image: Any) -> Bytes:
    array: Bytes = np.asarray(image, dtype=np.uint8)
    return array


def _stacked(rows: Sequence[Bytes]) -> Bytes:
    """Below each other on white; rows may differ in width."""
    width = max(row.shape[1] for row in rows)
    sheet = np.full((sum(row.shape[0] + GAP for row in rows), width, 3), 255, dtype=np.uint8)
    top = 0
    for row in rows:
        sheet[top : top + row.shape[0], : row.shape[1]] = row
        top += row.shape[0] + GAP
    return sheet
