"""A pipeline of diffusers from a folder, for `sparge report --pipeline`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparge.evaluate.language import Variant


@dataclass(frozen=True)
class PipelineRequest:
    """A folder, what to ask of the pipeline in it, and the settings to look at."""

    folder: Path
    arguments: dict[str, Any]
    variant: Variant
    seeds: int
    device: torch.device
    dtype: torch.dtype


def pipeline_request(
    folder: Path,
    prompt: str | None,
    steps: int | None,
    size: str | None,
    frames: int | None,
    variant: Variant,
    seeds: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> PipelineRequest:
    """Checks what can be checked before the pipeline is loaded; what is None is left to the pipeline."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"--pipeline {folder} is no folder that a pipeline of diffusers was saved in.")
    if prompt is None:
        raise ValueError("--pipeline needs a --prompt.")
    height, width = (None, None) if size is None else _size(size)
    asked = {
        "prompt": prompt, "num_inference_steps": steps, "height": height, "width": width, "num_frames": frames
    }  # fmt: skip
    arguments = {name: value for name, value in asked.items() if value is not None}
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    return PipelineRequest(folder, arguments, variant, seeds, device, dtype or usual)


def _size(text: str) -> tuple[int, int]:
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"--size must be HEIGHT,WIDTH, as in 480,832, not {text}.")
    height, width = map(int, sides)
    return height, width


def load_pipeline(request: PipelineRequest) -> Any:
    """On its device, and silent. Nothing is asked of a hub."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(request.folder, torch_dtype=request.dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    unknown = set(request.arguments) - set(inspect.signature(pipeline.__call__).parameters)
    if unknown:
        raise ValueError(f"{type(pipeline).__name__} takes no {' and no '.join(sorted(unknown))}.")
    return pipeline.to(request.device)
