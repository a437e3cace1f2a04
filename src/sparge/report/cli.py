"""`sparge report`: its options."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

MODEL_TOKENS = 4096


def report(
    out: Annotated[Path, typer.Argument(help="The page to write.")] = Path("sparge-report.html"),
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A folder of transformers, or a Llama's GGUF file. Default: SmolLM2-135M."),
    ] = None,
    captured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Q, K and V of one layer (sparge capture) instead of a model.")
    ] = None,
    pipeline: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A pipeline of diffusers instead, as save_pretrained writes it."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="--pipeline: what to make.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="--pipeline: denoising steps. Default: its own.")] = None,
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHT,WIDTH", help="--pipeline: in pixels. Default: its own.")
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="--pipeline: of a video. Default: its own.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="--pipeline: samples to compare, from seed 0. Default: 2.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=128, help="Length to read. Default: 4096, at most.")] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text, or python-docs or python-code. Default: python-docs.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="SETTINGS", help="As in gap=6,quantization=none. Default: the default.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="A profile from sparge tune.")] = None,
    needles: Annotated[
        int, typer.Option(min=0, max=100, metavar="DEPTHS", help="Hide facts at so many depths: adds the needle grid.")
    ] = 0,
    yarn: Annotated[float | None, typer.Option(metavar="FACTOR", help="Extend the model's context by YaRN.")] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="FRAMES,HEIGHT,WIDTH", help="Of --captured tokens: draws the Hilbert order.")
    ] = None,
    vision: Annotated[
        Path | None, typer.Option(metavar="FILE", help="vision.json of sparge eval-vision: adds PSNR and SSIM.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. Default: that of the model's file; of a pipeline, see the docs."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Look inside a model that runs sparse, and write what is found as one HTML page that opens from disk.

    Sparsity, error and missed attention for each layer and head, masks beside
    the true attention, where the time goes, what stayed dense and why,
    perplexity both ways; of a pipeline samples both ways. Ctrl-C keeps what
    was done.

    Examples:

      sparge report

      sparge report long.html --tokens 8192 --needles 5

      sparge report mine.html --model folder --profile mine.safetensors

      sparge report video.html --captured video.safetensors --grid 16,30,45

      sparge report wan.html --pipeline folder --prompt "a cat" --steps 20
    """
    needed = ["jinja2"]
    if pipeline is not None:
        needed += ["diffusers", "transformers", "skimage", "PIL"]
    elif captured is None:
        needed += ["transformers"] if model is not None and model.suffix != ".gguf" else ["transformers", "gguf"]
    if any(importlib.util.find_spec(name) is None for name in needed):
        package = "'sparge[report]'" if pipeline is None else "'sparge[report,eval]' diffusers accelerate"
        sys.exit(f"sparge report needs {', '.join(needed)} for this: pip install {package}.")
    from sparge.evaluate.command import Request as ModelRequest
    from sparge.evaluate.command import details_for
    from sparge.evaluate.settings import DEFAULT, parse_config, parse_device, parse_dtype, variants_of
    from sparge.evaluate.tasks import NEEDLE, PPL
    from sparge.evaluate.texts import read_texts
    from sparge.report.command import CapturedRequest, Request, captured_request, read_vision, run_report
    from sparge.report.pipeline import PipelineRequest, pipeline_request

    source: ModelRequest | CapturedRequest | PipelineRequest
    for_readers = {"--model": model, "--text": text, "--needles": needles or None, "--yarn": yarn}
    for_pipelines = {"--prompt": prompt, "--steps": steps, "--size": size, "--frames": frames, "--seeds": seeds}
    try:
        if pipeline is None:
            _refuse(for_pipelines, "is for a --pipeline")
        if config is not None and profile is not None:
            raise ValueError("a page shows one of --config and --profile: give only one.")
        if pipeline is not None:
            _refuse(
                {**for_readers, "--captured": captured, "--tokens": tokens, "--grid": grid}, "is not for a --pipeline"
            )
            variant = variants_of([config] if config else [], [profile] if profile else [])[0]
            source = pipeline_request(
                pipeline, prompt, steps, size, frames, variant, seeds or 2, parse_device(device), parse_dtype(dtype)
            )
        elif captured is not None:
            for_models = {**for_readers, "--profile": profile, "--dtype": dtype}
            _refuse(for_models, "is for models, and --captured names a file of tensors")
            settings = config or DEFAULT
            source = captured_request(captured, tokens, grid, parse_config(settings), settings, parse_device(device))
        else:
            _refuse({"--grid": grid}, "is for --captured tokens of images or video")
            tasks = (PPL, NEEDLE) if needles else (PPL,)
            source = ModelRequest(
                tasks=tasks,
                texts=tuple(read_texts(() if text is None else (text,))),
                lengths=(tokens or MODEL_TOKENS,),
                variants=tuple(variants_of([config] if config else [], [profile] if profile else [])),
                model=model,
                yarn=yarn,
                device=parse_device(device),
                dtype=parse_dtype(dtype),
                details=details_for(tasks, {"windows": 1, "depths": needles or None}),
            )
        outcome = run_report(Request(source, out, [] if vision is None else read_vision(vision)), as_json)
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"sparge report: {error}")
    raise typer.Exit(outcome)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} {why}.")
