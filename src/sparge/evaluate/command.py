"""What `sparge eval` does with its options: makes the cases, runs them under a progress bar, writes the results."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparge.bench.machine import hardware, versions
from sparge.evaluate import report
from sparge.evaluate.language import Variant, evaluate
from sparge.evaluate.models import LanguageModel, extend_context, load_model
from sparge.evaluate.results import LanguageResults
from sparge.evaluate.tasks import (
    GREEDY,
    MULTIVALUE,
    NEEDLE,
    PPL,
    RETRIEVAL,
    TASKS,
    TRACKING,
    Case,
    greedy_cases,
    multivalue_cases,
    needle_cases,
    perplexity_cases,
    tracking_cases,
)
from sparge.evaluate.texts import Encoder, Text
from sparge.integrations.fallback import DenseAttentionWarning
from sparge.progress import INTERRUPTED, progress_on


@dataclass(frozen=True)
class Details:
    """How many cases a task has, and of which kind."""

    windows: int = 2
    depths: int = 5
    draws: int = 1
    keys: tuple[int, ...] = (1,)
    values: int = 4
    hops: int = 4
    new_tokens: int = 64
    seed: int = 0


USED_BY = {
    "windows": (PPL, GREEDY), "depths": RETRIEVAL, "draws": RETRIEVAL, "keys": (NEEDLE,), "values": (MULTIVALUE,),
    "hops": (TRACKING,), "new_tokens": (GREEDY,), "seed": RETRIEVAL,
}  # fmt: skip


def details_for(tasks: Sequence[str], given: dict[str, Any]) -> Details:
    """The options that were given (the others are None), each of them for a task that was asked for."""
    named = {name: value for name, value in given.items() if value is not None}
    for name in named:
        if not set(USED_BY[name]).intersection(tasks):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for {', '.join(USED_BY[name])}, and no such --task was asked for.")
    return Details(**named)


@dataclass(frozen=True)
class Request:
    """What to ask of which model, and under which settings."""

    tasks: tuple[str, ...]
    texts: tuple[Text, ...]
    lengths: tuple[int, ...]
    variants: tuple[Variant, ...]
    model: Path | None  # None: SmolLM2
    yarn: float | None
    device: torch.device
    dtype: torch.dtype | None  # None: that of the file
    details: Details

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"--task must be one of {', '.join(TASKS)}, not {task}.")

    def cases(self, tokenizer: Any) -> list[Case]:
        encode, texts, details, made = Encoder(tokenizer), self.texts, self.details, list[Case]()
        for task, tokens in product(dict.fromkeys(self.tasks), self.lengths):
            grid = (encode, texts, tokens, details.depths, details.draws)
            if task == PPL:
                made += perplexity_cases(encode, texts, tokens, details.windows)
            elif task == GREEDY:
                made += greedy_cases(encode, texts, tokens, details.windows, details.new_tokens)
            elif task == MULTIVALUE:
                made += multivalue_cases(*grid, details.values, details.seed)
            elif task == TRACKING:
                made += tracking_cases(*grid, details.hops, details.seed)
            else:
                for keys in details.keys:
                    made += needle_cases(*grid, keys, details.seed)
        return made


def run_eval(request: Request, out: Path | None, as_json: bool) -> int:
    """Evaluates, prints, writes; returns the exit code."""
    console = Console(stderr=as_json)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, not after
    journal = None if out is None else out / "eval.journal"
    with progress_on(console) as progress, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DenseAttentionWarning)
        task = progress.add_task("loading the model", total=None)
        loaded = load(request)
        cases = request.cases(loaded.tokenizer)
        check_length(loaded, cases)
        total = sum(len(case.ids) for case in cases) * (1 + len(request.variants))
        progress.update(task, description="starting", total=total)

        def on_step(what: str, tokens: int) -> None:
            progress.update(task, description=what, advance=tokens)

        results = evaluate(loaded.model, cases, request.variants, name=loaded.name, journal=journal, on_step=on_step)
    results.about = about(request, loaded)
    results.notes += list(dict.fromkeys(str(one.message) for one in said))
    results.notes += [why_dense(variant) for variant in results.all_dense()]
    _show(results, len(cases), out, console, as_json)
    if journal is not None and not results.interrupted:
        journal.unlink()
    return INTERRUPTED if results.interrupted else 0


def load(request: Request) -> LanguageModel:
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is one already
    loaded = load_model(request.model, request.dtype)
    if request.yarn is not None:
        extend_context(loaded.model, request.yarn)
    loaded.model.to(request.device)
    return loaded


def check_length(loaded: LanguageModel, cases: list[Case]) -> None:
    longest = getattr(loaded.model.config, "max_position_embeddings", None)
    needed = max(len(case.ids) + case.new_tokens for case in cases)
    if longest is not None and needed > longest:
        raise ValueError(f"{loaded.name} reads at most {longest} tokens, not {needed}; see --tokens and --yarn.")


def about(request: Request, loaded: LanguageModel) -> dict[str, Any]:
    rope = "" if request.yarn is None else f", YaRN x{request.yarn:g}"
    return {
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "run": f"{loaded.model.dtype} on {request.device.type}{rope}".replace("torch.", ""),
        "texts": ", ".join(text.name for text in request.texts),
        "machine": hardware(request.device),
        "versions": {**versions(), "transformers": metadata.version("transformers")},
    }


def why_dense(variant: str) -> str:
    return (
        f"{variant}: every call was left to dense attention, as too short to gain on this device; to judge sparse "
        "attention all the same, name a number format, as in --config quantization=none."
    )


def _show(results: LanguageResults, planned: int, out: Path | None, console: Console, as_json: bool) -> None:
    if as_json:
        print(results.to_json())
    elif results.cases:
        report.show(results, console)
    for note in results.notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    if results.interrupted:
        where = "" if out is None else f"; they are kept in {out}, and the same command goes on from there"
        text = f"Interrupted after {len(results.cases)} of {planned} cases{where}."
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    if out is None:
        return
    paths = report.write(results, out)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plots: they need matplotlib (pip install matplotlib).", highlight=False)
    else:
        from sparge.evaluate.plots import draw_all

        paths += draw_all(results, out)
    console.print(f"Written: {', '.join(map(str, paths))}", soft_wrap=True, highlight=False, markup=False)
