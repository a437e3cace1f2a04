"""Trains a recipe on one GPU, in the time that is given; the same command goes on with a run that was stopped.

    python -m examples.train.train video --data examples/train/data/video.safetensors --out runs/video --minutes 8

The folder gets a checkpoint, the averaged weights with a model card, and the loss curve. The clips, noise and times of
a step depend on the seed and the step's number alone, so with --steps a run that was stopped loses nothing by it.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.train.card import draw_losses, model_card
from examples.train.data import Batch, Clips, read_clips
from examples.train.errors import ExampleError, said_plainly
from examples.train.flow import draw_times, flow_loss
from examples.train.model import VideoTransformer, load_weights, save_weights
from examples.train.recipes import RECIPES, Recipe, Stage, estimate

NOTED_STEPS = 10  # losses are read from the device once in so many
HELD_OUT_CLIPS = 32
HELD_OUT_SEED = 1 << 40  # far from those of the steps
ATTENTIONS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class RunError(ExampleError):
    """A run that cannot be started or gone on with; the message is one sentence."""


@dataclass(frozen=True)
class Limits:
    """When a run ends: whichever comes first."""

    steps: int | None
    minutes: float | None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise RunError("give --minutes, --steps, or both.")

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1. The stages and the learning rate follow it."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(by_steps, by_time))


@dataclass
class History:
    """What is kept of a run besides its weights."""

    step: int = 0
    seconds: float = 0.0
    losses: list[dict[str, float]] = field(default_factory=list)
    held_out: list[dict[str, float]] = field(default_factory=list)


class Run:
    """A model in training. `advance` is one step."""

    def __init__(self, name: str, clips: Clips, limits: Limits, seed: int, device: torch.device) -> None:
        self.name, self.recipe, self.clips, self.limits = name, RECIPES[name], clips, limits
        self.seed, self.device, self.history = seed, device, History()
        torch.manual_seed(seed)
        self.model = VideoTransformer(self.recipe.model(len(clips.classes))).to(device)
        self.averaged = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=device.type == "cuda"
        )
        self.windows = {held_out: clips.windows(self.recipe.frames, held_out) for held_out in (False, True)}
        self.before: dict[str, float] = {}  # what was trained before this run began

    @property
    def progress(self) -> float:
        return self.limits.progress(self.history.step, self.history.seconds)

    @property
    def stage(self) -> Stage:
        progress = self.progress
        return next((stage for stage in self.recipe.stages if progress < stage.until), self.recipe.stages[-1])

    def advance(self) -> Tensor:
        """One step of the optimizer; its loss, still on the device."""
        stage, step = self.stage, self.history.step
        draw, device_draw = self._generators(self.seed * 1_000_003 + step)
        batch = self.clips.training_batch(self.windows[False], stage.batch, self.recipe.frames, self.recipe.side, draw)
        hidden = torch.rand(stage.batch, generator=draw) < self.recipe.unlabelled
        labels = batch.labels.masked_fill(hidden.to(self.device), self.model.config.classes)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, step, self.progress)
        loss = self._loss(self.model, shrunk(batch, stage.shrink), labels, device_draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average(step)
        self.history.step += 1
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Of the averaged weights, always on the same clips, noise and times."""
        stage = self.recipe.stages[-1]
        losses = []
        for first in range(0, HELD_OUT_CLIPS, stage.batch):
            numbers = [97 * number for number in range(first, min(first + stage.batch, HELD_OUT_CLIPS))]
            batch = self.clips.fixed_batch(self.windows[True], numbers, self.recipe.frames, self.recipe.side)
            draw = self._generators(HELD_OUT_SEED + first)[1]
            losses.append(self._loss(self.averaged, batch, batch.labels, draw) * len(numbers))
        return float(torch.stack(losses).sum()) / HELD_OUT_CLIPS

    def _loss(self, model: VideoTransformer, batch: Batch, labels: Tensor, draw: torch.Generator) -> Tensor:
        times = draw_times(len(labels), self.recipe.shift, draw)
        noise = torch.randn(batch.pixels.shape, generator=draw, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return flow_loss(model, batch, times, noise, labels)

    def _generators(self, seed: int) -> tuple[torch.Generator, torch.Generator]:
        """For what is small, on the CPU, and for noise, on the device."""
        return torch.Generator().manual_seed(seed), torch.Generator(self.device).manual_seed(seed)

    @torch.no_grad()
    def _average(self, step: int) -> None:
        share = 1 - min(self.recipe.averaging, (1 + step) / (10 + step))  # soon forgets the first steps
        for kept, new in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
            kept.lerp_(new, share)

    # ---- files

    def start_from(self, path: Path) -> None:
        """Begins with these weights instead of random ones."""
        model, facts = load_weights(path)
        if model.config != self.model.config:
            raise RunError(f"{path} holds another model than that of {self.name} for this data.")
        self.model.load_state_dict(model.state_dict())
        self.averaged.load_state_dict(model.state_dict())
        earlier = json.loads(facts["trained"])
        before = earlier.get("before", {})
        self.before = {name: earlier[name] + before.get(name, 0) for name in ("steps", "seconds")}

    def save(self, path: Path) -> None:
        """Written beside the target first and then renamed: a checkpoint is always a whole one."""
        state = {
            "job": self._job(), "history": asdict(self.history), "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict(), "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["job"] != self._job():
            raise RunError(f"{path} is of another recipe, start, seed or data; delete it or name another folder.")
        self.model.load_state_dict(state["model"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])

    def _job(self) -> dict[str, Any]:
        data = f"{self.clips.source}, {len(self.clips.frames)} frames"
        settings = repr(self.recipe)
        return {"recipe": self.name, "settings": settings, "seed": self.seed, "data": data, "before": self.before}


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Rises over the first steps, stays, and falls to a fiftieth at the end."""
    rise = min(1.0, (step + 1) / recipe.warmup)
    fall = min(1.0, (1 - progress) / (1 - recipe.decay_from))
    return recipe.learning_rate * rise * max(fall, 0.02)


def shrunk(batch: Batch, factor: int) -> Batch:
    if factor == 1:
        return batch
    flat = batch.pixels.flatten(0, 1).permute(0, 3, 1, 2)
    small = torch.nn.functional.avg_pool2d(flat, factor).permute(0, 2, 3, 1)
    return Batch(small.unflatten(0, batch.pixels.shape[:2]), batch.labels)


def train(run: Run, out: Path, save_every: float, console: Console) -> None:
    """Until the limits are reached or Ctrl-C, which saves too."""
    checkpoint = out / "checkpoint.pt"
    begun, before = time.perf_counter(), run.history.seconds
    saved, pending = begun, list[Tensor]()
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar, sdpa_kernel(ATTENTIONS, set_priority=True):
        task = bar.add_task(run.name, total=1.0, completed=run.progress)
        try:
            while run.progress < 1:
                stage = run.stage
                pending.append(run.advance())
                if len(pending) == NOTED_STEPS or run.stage != stage or run.progress == 1:
                    loss = float(torch.stack(pending).mean())  # waits for the device, so the clock below is right
                    pending.clear()
                    run.history.losses.append({"step": run.history.step, "loss": loss, "shrink": stage.shrink})
                    bar.update(task, completed=run.progress, description=_described(run, loss))
                run.history.seconds = before + time.perf_counter() - begun
                if time.perf_counter() - saved > save_every:
                    _note(run, checkpoint, console)
                    saved = time.perf_counter()
        except KeyboardInterrupt:
            console.print("Interrupted: the same command goes on from here.", highlight=False)
    _note(run, checkpoint, console)


def _described(run: Run, loss: float) -> str:
    return f"{run.name}, step {run.history.step}, loss {loss:.4f}"


def _note(run: Run, checkpoint: Path, console: Console) -> None:
    """A checkpoint, and a line for those who read a log instead of a bar."""
    loss = run.held_out_loss()
    run.history.held_out.append({"step": run.history.step, "loss": loss})
    run.save(checkpoint)
    last = run.history.losses[-1]["loss"] if run.history.losses else float("nan")
    console.print(
        f"{run.progress:.0%}, step {run.history.step}, {run.history.seconds:.0f} s, 1/{run.stage.shrink} of the side: "
        f"loss {last:.4f}, held out {loss:.4f}",
        highlight=False,
        soft_wrap=True,
    )


def write_results(run: Run, out: Path, console: Console) -> None:
    """The averaged weights, their card, and the loss curve."""
    recipe, history = run.recipe, run.history
    facts = {
        "recipe": run.name,
        "classes": json.dumps(list(run.clips.classes)),
        "data": run.clips.source,
        "trained": json.dumps(
            {"steps": history.step, "seconds": round(history.seconds), "seed": run.seed, "device": _device(run.device),
             "held_out_loss": history.held_out[-1]["loss"], "before": run.before}
        ),
        "sampling": json.dumps(
            {"steps": recipe.sampling_steps, "guidance": recipe.guidance, "shift": recipe.shift}
        ),
    }  # fmt: skip
    save_weights(run.averaged, out / f"{run.name}.safetensors", facts)
    (out / f"{run.name}.md").write_text(model_card(run.averaged, facts), encoding="utf-8")
    (out / "losses.json").write_text(json.dumps(asdict(history), indent=1) + "\n", encoding="utf-8")
    drawn = draw_losses(history.losses, history.held_out, out / "losses.png")
    console.print(f"Written to {out}." if drawn else f"Written to {out}; losses.png needs matplotlib.", highlight=False)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=tuple(RECIPES))
    parser.add_argument("--data", type=Path, help="file written by examples.train.prepare")
    parser.add_argument("--out", type=Path, help="folder of this run")
    parser.add_argument("--minutes", type=float, help="stop and save after so long, saved time of the run included")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--start", type=Path, metavar="WEIGHTS", help="begin with these, not with random ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: faster steps after a minute")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--estimate", action="store_true", help="print what a run costs, and train nothing")
    options = parser.parse_args()
    if not options.estimate and (options.data is None or options.out is None):
        parser.error("training needs --data and --out.")
    return options


def main() -> None:
    options = parsed()
    if options.estimate:
        print(estimate(options.recipe, options.minutes or 8))
        return
    console, device = Console(), torch.device(options.device)
    clips = read_clips(options.data, device)
    run = Run(options.recipe, clips, Limits(options.steps, options.minutes), options.seed, device)
    if options.start is not None:
        run.start_from(options.start)
    options.out.mkdir(parents=True, exist_ok=True)
    if (options.out / "checkpoint.pt").is_file():
        run.resume(options.out / "checkpoint.pt")
        console.print(f"Going on from step {run.history.step}.", highlight=False)
    if options.compile:
        for block in run.model.blocks:
            block.compile(dynamic=False)  # the stages have shapes of their own
    train(run, options.out, options.save_every, console)
    write_results(run, options.out, console)


if __name__ == "__main__":
    with said_plainly():
        main()
