"""What is trained, for how long on which grid, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from examples.train.model import ModelConfig, forward_flops

SUSTAINED_FLOPS = 275e12  # of one H200 in bfloat16, attention and its gradient included: measured at 16,384 tokens


@dataclass(frozen=True)
class Stage:
    """Clips made smaller first: far cheaper, and enough to learn what belongs where."""

    shrink: int  # of height and width
    batch: int
    until: float  # share of the whole run


@dataclass(frozen=True)
class Recipe:
    """A model but for the number of its classes, and how it is trained and sampled."""

    frames: int
    side: int
    patch: int
    channels: int
    depth: int
    stages: tuple[Stage, ...]
    shift: float  # of times towards the noise
    guidance: float
    sampling_steps: int
    learning_rate: float = 6e-4
    warmup: int = 100  # steps
    decay_from: float = 0.7  # share of the run after which the learning rate falls
    averaging: float = 0.999  # of the weights that are kept
    unlabelled: float = 0.1  # share of clips trained without their class, for guidance

    def model(self, classes: int) -> ModelConfig:
        return ModelConfig(self.frames, self.side, self.patch, self.channels, self.depth, classes)

    def step_flops(self, stage: Stage) -> float:
        """One training step: three times the weights' forward, three and a half times attention's."""
        config = self.model(1)
        frames, height, width = config.grid
        weights, attention = forward_flops(config, (frames, height // stage.shrink, width // stage.shrink))
        return stage.batch * (3 * weights + 3.5 * attention)


RECIPES = {
    "video": Recipe(
        frames=16, side=128, patch=4, channels=320, depth=6,
        stages=(Stage(2, 32, until=0.4), Stage(1, 8, until=1.0)),
        shift=3.0, guidance=1.5, sampling_steps=32,
    ),
    "image": Recipe(
        frames=1, side=128, patch=2, channels=320, depth=6,
        stages=(Stage(2, 128, until=0.35), Stage(1, 32, until=1.0)),
        shift=2.0, guidance=2.0, sampling_steps=32,
    ),
    "tiny-video": Recipe(
        frames=4, side=32, patch=4, channels=64, depth=2,
        stages=(Stage(2, 4, until=0.4), Stage(1, 4, until=1.0)),
        shift=1.0, guidance=1.5, sampling_steps=4, learning_rate=2e-3, warmup=2, averaging=0.9,
    ),
    "tiny-image": Recipe(
        frames=1, side=32, patch=2, channels=64, depth=2,
        stages=(Stage(2, 8, until=0.4), Stage(1, 4, until=1.0)),
        shift=1.0, guidance=1.0, sampling_steps=4, learning_rate=2e-3, warmup=2, averaging=0.9,
    ),
}  # fmt: skip


def estimate(name: str, minutes: float, flops_per_second: float = SUSTAINED_FLOPS) -> str:
    """Tokens, operations and steps of a run, as a table."""
    recipe = RECIPES[name]
    lines = ["| stage | tokens | clips a step | TFLOP a step | seconds a step | steps | clips |", "|" + "---|" * 7]
    begun = 0.0
    for number, stage in enumerate(recipe.stages, 1):
        tokens = recipe.model(1).tokens // stage.shrink**2
        cost = recipe.step_flops(stage)
        steps = int((stage.until - begun) * 60 * minutes * flops_per_second / cost)
        begun = stage.until
        lines.append(
            f"| {number} | {tokens:,} | {stage.batch} | {cost / 1e12:.1f} | {cost / flops_per_second:.3f} | "
            f"{steps:,} | {steps * stage.batch:,} |"
        )
    return "\n".join(lines)
