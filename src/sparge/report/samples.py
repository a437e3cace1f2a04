"""A model sampled dense and sparse from the same seeds, and looked at from inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch

from sparge.bench.machine import hardware, versions
from sparge.evaluate.language import Variant
from sparge.evaluate.vision import Pair, SampleError, paired, sampled
from sparge.evaluate.vision_command import VisionResult
from sparge.integrations.diffusers.families import is_compiled
from sparge.integrations.diffusers.models import DENOISERS, diffusers_models, is_pipeline, original
from sparge.integrations.diffusers.order import Grid
from sparge.integrations.layers import ALONE, DenseLayers, Layer
from sparge.integrations.patch import patch
from sparge.integrations.torch_sdpa import patched
from sparge.report.inside import Forward, Look, Parts, look_inside, watched
from sparge.report.mass import picture_side
from sparge.report.page import Report, Whole
from sparge.report.strips import strips

VISION = ("settings", "seeds", "psnr", "worst_psnr", "ssim", "skipped", "speedup")

Run = Callable[[int], Any]  # of a seed
OnStep = Callable[[str, int], None]  # what was done, and how many parts of the work that were


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, what runs it, and the settings to look at."""

    model: Any
    run: Run  # gives pictures to compare, or None
    variant: Variant = field(default_factory=lambda: Variant("default"))
    seeds: int = 2
    forward: int | None = None  # to look inside, from 1; None: the middle one of those that are sparse
    grid: Grid | None = None
    dense_layers: DenseLayers = 0
    dense_steps: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise ValueError(f"seeds must be how many samples to compare, 1 or more, not {self.seeds!r}.")
        if not self.by_patch and (self.variant.profile, self.dense_layers, self.dense_steps) != (None, 0, 0):
            raise ValueError(
                f"sparge.patch knows no layer of {type(self.model).__name__}, so that profile, dense_layers and "
                "dense_steps would mean none of them."
            )
        outer = [self.model, *(getattr(self.model, name, None) for name in DENOISERS)]
        for part in self.parts.values():
            if any(is_compiled(one) for one in (*outer, *part.modules())):
                raise ValueError(
                    f"a report cannot look inside a compiled model: give it {type(part).__name__} as it was."
                )
            if getattr(part, "_parallel_config", None) is not None:
                raise ValueError(f"a report looks at a model on one device, and {type(part).__name__} is on several.")
        if self.grid is not None and diffusers_models(self.model):
            raise ValueError("grid is for models of one's own: those of diffusers tell where their tokens stand.")

    @cached_property
    def parts(self) -> Parts:
        """The models whose forwards are counted."""
        return diffusers_models(self.model) or ({} if is_pipeline(self.model) else {"": original(self.model)})

    @cached_property
    def planned(self) -> tuple[Layer, ...]:
        config, profile = self.variant.config, self.variant.profile
        plan = patch(
            self.model, config, profile, dry_run=True, dense_layers=self.dense_layers, dense_steps=self.dense_steps
        )
        return plan.layers

    @cached_property
    def by_patch(self) -> bool:
        """Whether sparge.patch reaches its layers; else every call of torch's attention is taken."""
        known = any(layer.action != ALONE for layer in self.planned)
        return known or is_pipeline(self.model) or bool(diffusers_models(self.model))

    def sparse(self) -> AbstractContextManager[Any]:
        config, profile = self.variant.config, self.variant.profile
        if not self.by_patch:
            return patched(config)
        return patch(self.model, config, profile, dense_layers=self.dense_layers, dense_steps=self.dense_steps)


@dataclass
class Compared:
    """Samples of each seed both ways, and the forwards of the models that made them."""

    pairs: list[Pair] = field(default_factory=list)
    dense: list[dict[str, list[Forward]]] = field(default_factory=list)
    sparse: list[dict[str, list[Forward]]] = field(default_factory=list)

    def chosen(self, forward: int | None) -> dict[str, int]:
        """For each model the forward to look inside, from 0: that one, or the middle one of those with sparse calls."""
        found = {}
        for name, forwards in self.sparse[0].items():
            if forward is not None and not 1 <= forward <= len(forwards):
                raise ValueError(f"forward must lie from 1 to {len(forwards)}, the last of a sample, not {forward}.")
            numbers = [number for number, one in enumerate(forwards) if one.heads] or list(range(len(forwards)))
            found[name] = numbers[len(numbers) // 2] if forward is None else forward - 1
        return found

    def whole(self) -> Whole | None:
        """One forward of each model; sparse, one that had sparse calls."""
        ways = [(_seconds(self.dense, name), _seconds(self.sparse, name, only_sparse=True)) for name in self.sparse[0]]
        timed = [way for way in ways if all(way)]
        if not timed:
            return None
        counts = [sum(map(len, own)) for own in zip(*timed, strict=True)]
        measured = f"the whole is one forward of the model (medians of {counts[0]} dense and {counts[1]} sparse ones)"
        return Whole(sum(median(dense) for dense, _ in timed), sum(median(sparse) for _, sparse in timed), measured)


def _seconds(samples: Sequence[dict[str, list[Forward]]], name: str, only_sparse: bool = False) -> list[float]:
    """Of the forwards of one model, without the first, which pays for compilation, where there are others."""
    found = [one.seconds for sample in samples for one in sample.get(name, ()) if one.heads or not only_sparse]
    return found[1:] or found


@torch.no_grad()
def examine(
    subject: Subject, title: str, about: Mapping[str, str] | None = None, on_step: OnStep | None = None
) -> Report:
    """Both ways over every seed first, for quality and times; then the first once more, looked at from inside."""
    step = on_step or (lambda what, parts: None)
    compared, look = Compared(), Look(interrupted=True)
    chosen: dict[str, int] = {}
    try:
        _compare(subject, compared, step)
        chosen = compared.chosen(subject.forward)
        heads = sum(compared.sparse[0][name][number].heads for name, number in chosen.items())
        planned = subject.planned if subject.by_patch else ()
        run, side = partial(subject.run, 0), picture_side(heads)
        look = look_inside(
            subject.parts, planned, subject.sparse, run, side, lambda name: step(name, 0), chosen, subject.grid
        )
        if subject.grid is not None and look.layers and look.order is None:
            raise ValueError(f"grid {subject.grid} has more tokens than any sparse call of the model.")
        step("looked inside", 1)
    except KeyboardInterrupt:
        look.interrupted = True
    return Report(
        title=title,
        settings=subject.variant.name,
        about={**(about or {}), **_about(subject, compared, chosen)},
        look=look,
        whole=compared.whole() if compared.sparse else None,
        vision=_vision(subject.variant, compared.pairs),
        samples=strips(compared.pairs),
        notes=_notes(look),
    )


def _compare(subject: Subject, compared: Compared, step: OnStep) -> None:
    for seed in range(subject.seeds):
        with watched(subject.parts) as watch:
            dense = sampled(subject.run, seed)
            compared.dense.append(watch.forwards)
        step(f"seed {seed}, dense", 1)
        if not watch.forwards:
            raise SampleError(f"the run never called {type(original(subject.model)).__name__}.")
        with watched(subject.parts) as watch:
            sparse = sampled(subject.run, seed, subject.sparse, watch.count)
            compared.sparse.append(watch.forwards)
        step(f"seed {seed}, sparse", 1)
        if dense.output is not None:
            compared.pairs.append(paired(seed, dense, sparse))


def _vision(variant: Variant, pairs: list[Pair]) -> list[dict[str, Any]]:
    if not pairs:
        return []
    facts = VisionResult(variant, pairs).summary()
    return [{name: facts[name] for name in VISION}]


def _notes(look: Look) -> list[str]:
    if look.layers or look.interrupted:
        return []
    return ["No attention call of the model was sparse, so there is nothing to see inside."]


def _about(subject: Subject, compared: Compared, chosen: Mapping[str, int]) -> dict[str, Any]:
    weight = next(next(iter(subject.parts.values())).parameters(), torch.empty(0))
    forwards = [
        f"forward {number + 1} of {len(compared.sparse[0][name])}{f' of {name[:-1]}' if name else ''}"
        for name, number in chosen.items()
    ]
    seeds, of_seed = [f"{subject.seeds} seed{'s' if subject.seeds > 1 else ''}"], ", seed 0"
    if not compared.pairs:  # what gives no pictures may know no seed either
        seeds, of_seed = [], ""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "run": ", ".join([weight.device.type, str(weight.dtype).removeprefix("torch."), *seeds]),
        "looked at": " and ".join(forwards) + of_seed if forwards else "nothing",
        "machine": hardware(weight.device),
        "versions": versions(),
    }
