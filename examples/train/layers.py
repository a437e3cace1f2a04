"""The attention layers of the model by name: to tune them, and to run each with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import sparge
from examples.train.data import Batch
from examples.train.flow import flow_loss, shifted
from examples.train.model import Attention, VideoTransformer
from examples.train.sample import Sampler
from sparge.integrations.torch_sdpa import redirected, torch_attention

EVERYTHING = sparge.SparseConfig(rule="topk", topk=1.0)
TUNED_AT = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of the way from noise to clip, in sampling steps

Attend = Callable[[str, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def attention_by_layer(model: VideoTransformer, attend: Attend) -> Iterator[None]:
    """Inside the block, each attention layer calls attend(layer name, query, key, value)."""
    current = ""

    def entering(name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            nonlocal current
            current = name

        return enter

    hooks = [
        module.register_forward_pre_hook(entering(name))
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]

    def called(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        with redirected(torch_attention):  # what `attend` itself asks of torch is for torch
            return attend(current, query, key, value)

    try:
        with redirected(called):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def sparse_layers(
    sampler: Sampler, config_for: Callable[[str], sparge.SparseConfig], dense_steps: int = 0
) -> Iterator[None]:
    """Inside the block the model is sparse, but for the first steps of a sample, which count as skipping nothing."""

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dense = sampler.step is not None and sampler.step < dense_steps
        return sparge.attention(query, key, value, config=EVERYTHING if dense else config_for(layer))

    with attention_by_layer(sampler.model, attend):
        yield


@dataclass(frozen=True, eq=False)
class NoisyClip:
    """An input of the model, with what it should predict."""

    batch: Batch
    times: Tensor
    noise: Tensor


def noisy_clips(sampler: Sampler, seed: int) -> list[NoisyClip]:
    """A training clip at each of the stages of sampling."""
    config = sampler.model.config
    windows = sampler.clips.windows(config.frames, held_out=False)
    draw = torch.Generator().manual_seed(seed)
    clips = []
    for share in TUNED_AT:
        batch = sampler.clips.training_batch(windows, 1, config.frames, config.side, draw)
        noise = torch.randn(batch.pixels.shape, generator=draw).to(sampler.device)
        times = shifted(torch.tensor([share], device=sampler.device), sampler.sampling["shift"])
        clips.append(NoisyClip(batch, times, noise))
    return clips


def tuned(
    sampler: Sampler,
    bounds: Sequence[float],
    base: sparge.SparseConfig,
    seed: int = 0,
    on_step: Callable[[str, str], None] | None = None,
) -> dict[float, sparge.Profile]:
    """A profile for each bound on the relative L1 of the heads, weighted by the flow loss."""

    def loss(clip: NoisyClip, attend: Attend) -> Tensor:
        with attention_by_layer(sampler.model, attend):
            return flow_loss(sampler.model, clip.batch, clip.times, clip.noise, clip.batch.labels)

    @torch.no_grad()
    def run(clip: NoisyClip, attend: Attend) -> None:
        loss(clip, attend)

    inputs = noisy_clips(sampler, seed)
    name = f"{sampler.name}, {sampler.model.order} order"
    with TemporaryDirectory() as folder:  # the searches share what they measure
        return {
            bound: sparge.tune(
                run, inputs, l1=bound, config=base, loss=loss, name=name,
                journal=Path(folder) / "journal.jsonl", on_step=on_step,
            )
            for bound in bounds
        }  # fmt: skip
