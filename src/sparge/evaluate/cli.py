"""`sparge eval` and `sparge eval-vision`: their options."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparge.evaluate.tasks import NEEDLE, PPL, TASKS

CONFIG = typer.Option(
    metavar="SETTINGS", help="As in gap=6,quantization=none or rule=topk,topk=0.3; repeatable. Default: the default."
)
OUT = typer.Option(metavar="DIR", help="Folder for JSON, Markdown and pictures.")
AS_JSON = typer.Option("--json", help="Print JSON and nothing else.")


def matching_tasks(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in TASKS if name.startswith(incomplete)]


def eval_language(
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="ppl, needle, multivalue, tracking or greedy; repeatable. Default: ppl, needle.",
            autocompletion=matching_tasks,
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="N,N,...", help="Lengths to read.")] = "4096",
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A text, or python-docs or python-code; repeatable. Default: python-docs."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A folder of transformers, or a Llama's GGUF file. Default: SmolLM2-135M."),
    ] = None,
    yarn: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="Extend the model's context by YaRN, as in 2.")
    ] = None,
    config: Annotated[list[str] | None, CONFIG] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A profile from sparge tune; repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: that of the model's file.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="ppl and greedy: windows per text and length. Default: 2.")
    ] = None,
    depths: Annotated[
        int | None, typer.Option(min=1, help="needle: depths; with draws, how many cases per length. Default: 5.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="needle: cases per depth; they take the texts in turn. Default: 1.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="needle: facts hidden, 1 asked for. Default: 1.")
    ] = None,
    values: Annotated[int | None, typer.Option(min=1, max=50, help="multivalue: numbers to find. Default: 4.")] = None,
    hops: Annotated[
        int | None, typer.Option(min=1, max=50, help="tracking: assignments after the first. Default: 4.")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="greedy: tokens to continue by. Default: 64.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the facts that are hidden. Default: 0.")] = None,
    out: Annotated[Path | None, OUT] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Read the same texts with a language model dense and sparse, and compare what it predicts and finds.

    ppl: perplexity, its change by position, divergence from the dense model.
    needle: a grid of lengths, depths and numbers of facts. multivalue and
    tracking: RULER's tasks. greedy: how long both continue a text alike.
    Every figure is paired, with a 95 % interval. Ctrl-C keeps what was done;
    with --out the same command goes on from there.

    Examples:

      sparge eval --out results

      sparge eval --task ppl --text novel.txt --tokens 4096,8192

      sparge eval --task needle --depths 10 --draws 3 --keys 1,4

      sparge eval --config default --config rule=topk,topk=0.45

      sparge eval --model folder --yarn 2 --tokens 16384 --device cuda
    """
    needed = ("transformers",) if model is not None and model.suffix != ".gguf" else ("transformers", "gguf")
    if any(importlib.util.find_spec(name) is None for name in needed):
        sys.exit("sparge eval needs transformers, and gguf for GGUF files and SmolLM2: pip install 'sparge[eval]'.")
    from sparge.evaluate.command import Request, details_for, run_eval
    from sparge.evaluate.settings import parse_counts, parse_device, parse_dtype, variants_of
    from sparge.evaluate.texts import read_texts

    try:
        tasks = tuple(task or (PPL, NEEDLE))
        details = {
            "windows": windows, "depths": depths, "draws": draws, "values": values, "hops": hops,
            "keys": None if keys is None else tuple(parse_counts("--keys", keys)), "new_tokens": new_tokens,
            "seed": seed,
        }  # fmt: skip
        request = Request(
            tasks=tasks,
            texts=tuple(read_texts(text or ())),
            lengths=tuple(parse_counts("--tokens", tokens)),
            variants=tuple(variants_of(config or (), profile or ())),
            model=model,
            yarn=yarn,
            device=parse_device(device),
            dtype=parse_dtype(dtype),
            details=details_for(tasks, details),
        )
        outcome = run_eval(request, out, as_json)
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"sparge eval: {error}")
    raise typer.Exit(outcome)


def eval_vision(
    sample: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function of a seed that gives an image or frames.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 4,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model in FILE.py to patch. Default: every call of torch's attention."),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="FUNCTION", help="A function of a seed in FILE.py that gives a held-out loss.")
    ] = None,
    config: Annotated[list[str] | None, CONFIG] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A profile for --model; repeatable.")
    ] = None,
    video: Annotated[str, typer.Option(help="gif or mp4: the two ways side by side, where there are frames.")] = "gif",
    fps: Annotated[int, typer.Option(min=1, max=120, help="Frames per second of the video.")] = 8,
    out: Annotated[Path | None, OUT] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Sample images or video dense and sparse from the same seeds, and compare them: PSNR, SSIM, loss, pictures.

    FILE.py is run as Python code. Frames are [frames, height, width,
    channels], an image is [height, width, channels]: bytes, or floats from 0
    to 1. Ctrl-C keeps what was done.

    Examples:

      sparge eval-vision mine.py:sample --seeds 8 --out results

      sparge eval-vision mine.py:sample --model transformer --video mp4 --out results
    """
    if importlib.util.find_spec("skimage") is None or importlib.util.find_spec("PIL") is None:
        sys.exit("sparge eval-vision needs scikit-image and Pillow: pip install 'sparge[eval]'.")
    from sparge.evaluate.settings import variants_of
    from sparge.evaluate.vision import SampleError
    from sparge.evaluate.vision_command import VisionRequest, run_eval_vision

    try:
        variants = tuple(variants_of(config or (), profile or ()))
        request = VisionRequest(sample, seeds, model, loss, variants, video, fps)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)  # before the work, not after
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"sparge eval-vision: {error}")
    try:  # what goes wrong inside FILE.py is said with its line, by __main__
        outcome = run_eval_vision(request, out, as_json)
    except SampleError as error:
        sys.exit(f"sparge eval-vision: {error}")
    raise typer.Exit(outcome)
