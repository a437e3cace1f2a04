"""What goes beside the weights: a model card and the loss curve."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from examples.train.model import VideoTransformer

CARD = """# {recipe}: a small diffusion transformer, trained to test sparse attention

**Trained by the authors of sparge as a test subject; it is of no use beside that.** {millions:.1f} M parameters,
{steps:,} steps in {minutes:.1f} minutes on one {device} (seed {seed}){before}.

| | |
|---|---|
| predicts | the direction from noise to clip (rectified flow), in pixels; no autoencoder |
| clips | {frames} frame{plural} of {side} x {side} pixels, patches of {patch} x {patch}: {tokens:,} tokens |
| attention | {depth} layers, {heads} heads of 64 channels, every token with every other; rotary positions |
| classes | {classes} |
| data | {data} |
| held-out flow loss | {held_out_loss:.4f}, averaged weights |
| weights | bfloat16, the average over the last steps |
| sampled with | {sampling} |

Quality of the samples themselves: judged by eye only; there is no FID or FVD, because the networks they need are not
part of this project. What sparsity changes is measured against the dense samples of the same seeds:
`python -m examples.train.evaluate`.
"""


def model_card(model: VideoTransformer, facts: dict[str, str]) -> str:
    config, trained = model.config, json.loads(facts["trained"])
    earlier = trained.get("before")
    before = f", after {earlier['steps']:,} steps in {earlier['seconds'] / 60:.1f} minutes" if earlier else ""
    sampling = ", ".join(f"{name} {value:g}" for name, value in json.loads(facts["sampling"]).items())
    return CARD.format(
        recipe=facts["recipe"],
        millions=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        steps=trained["steps"], minutes=trained["seconds"] / 60, device=trained["device"], seed=trained["seed"],
        frames=config.frames, plural="s" * (config.frames > 1),
        side=config.side, patch=config.patch, tokens=config.tokens,
        depth=config.depth, heads=config.heads, before=before,
        classes="; ".join(json.loads(facts["classes"])), data=facts["data"],
        held_out_loss=trained["held_out_loss"], sampling=sampling,
    )  # fmt: skip


def draw_losses(losses: Sequence[dict[str, float]], held_out: Sequence[dict[str, float]], path: Path) -> bool:
    """Whether it could be drawn: matplotlib is not needed for training."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for shrink in sorted({record["shrink"] for record in losses}, reverse=True):
        stage = [record for record in losses if record["shrink"] == shrink]
        axes.plot(
            [record["step"] for record in stage], [record["loss"] for record in stage],
            label="training, full size" if shrink == 1 else f"training, 1/{shrink:g} of the side", linewidth=0.8,
        )  # fmt: skip
    axes.plot(
        [record["step"] for record in held_out], [record["loss"] for record in held_out],
        "k.-", label="held out, full size, averaged weights",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="flow loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
