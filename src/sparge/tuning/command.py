"""What `sparge tune` and `sparge profile` do with their options."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from sparge.config import SparseConfig
from sparge.profile import Profile
from sparge.progress import INTERRUPTED, progress_on
from sparge.tuning.prediction import steps_of
from sparge.tuning.search import default_spend, tune


@dataclass(frozen=True)
class Request:
    """What to tune, on what, and where to."""

    out: Path
    model: Path | None  # a folder of transformers, or a GGUF file; None: SmolLM2
    texts: tuple[Path, ...]  # none: Python's own reference prose
    tokens: int
    inputs: int
    l1: float | None
    l2: float | None
    spend: str | None
    divergence: float | None
    config: SparseConfig
    device: torch.device
    dtype: torch.dtype | None  # None: that of the file

    @property
    def journal(self) -> Path:
        return self.out.with_name(self.out.name + ".journal")


def run_tune(request: Request, as_json: bool) -> int:
    """Tunes, writes, prints; returns the exit code."""
    console = Console(stderr=as_json)
    if request.out.is_dir():
        raise ValueError(f"{request.out} is a folder: name the file to write.")
    request.out.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after
    texts = _texts(request)
    start = time.perf_counter()
    try:
        with progress_on(console) as progress:
            task = progress.add_task("loading the model", total=None)
            name, model, tokenizer = _load(request.model, request.dtype)
            model.to(request.device)
            longest = getattr(model.config, "max_position_embeddings", request.tokens)
            if request.tokens > longest:
                raise ValueError(f"{name} reads at most {longest} tokens, not {request.tokens}; see --tokens.")
            windows = cut_windows([_ids(tokenizer, text) for text in texts], request.tokens, request.inputs)
            inputs = [window.to(request.device) for window in windows]
            spend = request.spend or default_spend(True, (request.l1, request.l2))
            by_output = spend == "prediction"
            layers, passes = model.config.num_hidden_layers, 2 if request.l2 is None else 3
            steps = steps_of(layers) if by_output else passes * layers
            progress.update(task, total=steps * len(inputs), description="starting")

            def on_step(stage: str, layer: str) -> None:
                progress.update(task, description=stage, advance=1 if by_output or layer else 0)

            profile = tune(
                model, inputs, l1=request.l1, l2=request.l2, spend=spend, divergence=request.divergence,
                config=request.config, name=name, journal=request.journal, on_step=on_step,
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"what was measured is kept in {request.journal}" if request.journal.exists() else "nothing was measured"
        console.print(f"Interrupted: {kept}; the same command goes on from there.", soft_wrap=True, highlight=False)
        return INTERRUPTED
    profile.save(request.out)
    request.journal.unlink()
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"file": str(request.out), "seconds": seconds, **facts_of(profile)}, indent=1))
    else:
        console.print(str(profile), soft_wrap=True, highlight=False, markup=False)
        console.print(f"{request.out}: written after {seconds:.0f} s", soft_wrap=True, highlight=False, markup=False)
    return 0


def show(path: Path, as_json: bool) -> None:
    """Prints a profile."""
    profile = Profile.load(path)
    print(json.dumps(facts_of(profile), indent=1) if as_json else profile)


def facts_of(profile: Profile) -> dict[str, Any]:
    """The profile as plain values."""
    return {
        "model": profile.model,
        "base": json.loads(profile.base.encoded),
        "metrics": dict(profile.metrics),
        "versions": dict(profile.versions),
        "layers": {name: layer.vectors() for name, layer in profile.layers.items()},
    }


def cut_windows(texts: Sequence[Sequence[int]], tokens: int, count: int) -> list[Tensor]:
    """`count` windows of token ids [1, tokens], taken from the texts in turn and spread evenly over each."""
    windows: list[Tensor] = []
    for number, ids in enumerate(texts):
        share = len(range(number, count, len(texts)))
        whole = len(ids) // tokens
        if whole < share:
            raise ValueError(
                f"text {number + 1} holds {whole} windows of {tokens} tokens, and {share} are needed of it."
            )
        places = [index * whole // share * tokens for index in range(share)]
        windows += [torch.tensor([ids[place : place + tokens]]) for place in places]
    return windows


def _texts(request: Request) -> list[str]:
    if not request.texts:
        from pydoc_data.topics import topics

        return ["\n\n".join(topics[name] for name in sorted(topics))]
    return [path.read_text(encoding="utf-8") for path in request.texts]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _load(path: Path | None, dtype: torch.dtype | None) -> tuple[str, Any, Any]:
    from sparge.evaluate.models import load_model

    loaded = load_model(path, dtype)
    return loaded.name, loaded.model, loaded.tokenizer
