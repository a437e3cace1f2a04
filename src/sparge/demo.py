"""`sparge demo`: a real language model reads a real document twice, dense and sparse, and the results are compared."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge.api import attention, predict_mask
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import visibility
from sparge.integrations.transformers.interface import register_attention
from sparge.stages import Stats

CITIES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tallinn", "Adelaide")
PICTURED_LAYERS = (2, 14, 26)
PICTURED_HEADS = (0, 4, 8)
LOGITS_AT_ONCE = 1024  # rows of the vocabulary projection held in memory


@dataclass(frozen=True)
class Document:
    """Token ids that end in a question, its answer, and how many of the last ids are the answer."""

    ids: Tensor
    answer_tokens: int
    answer: str


@dataclass
class Reading:
    """One pass over the document."""

    seconds: float = math.inf
    attention_seconds: float = 0.0
    perplexity: float = 0.0
    best_tokens: Tensor | None = None
    needle_found: bool = False
    stats: list[Stats] = field(default_factory=list)

    @property
    def sparsity(self) -> float:
        executed = sum(int(s.executed.sum()) for s in self.stats)
        return 1 - executed / max(1, sum(int(s.visible.sum()) for s in self.stats))


def make_document(tokenizer: Any, length: int, seed: int = 0, depth: float = 0.35) -> Document:
    """Python's own reference prose, `length` tokens of it, with one fact hidden at `depth` and asked for at the end."""
    from pydoc_data.topics import topics

    chance = random.Random(seed)
    city, number = chance.choice(CITIES), str(chance.randrange(10**6, 10**7))
    prose = tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    needle = tokenizer(f"\nThe special magic number for {city} is: {number}.\n")["input_ids"]
    question = (
        f"\nQuestion: What is the special magic number for {city}?\nAnswer: The special magic number for {city} is:"
    )
    asked, answer = tokenizer(question)["input_ids"], tokenizer(f" {number}")["input_ids"]
    room = length - len(needle) - len(asked) - len(answer)
    split = int(room * depth)
    ids = prose[:split] + needle + prose[split:room] + asked + answer
    return Document(torch.tensor([ids]), len(answer), number)


class AttentionRecorder:
    """The attention function handed to transformers: runs dense or sparse, and times itself."""

    def __init__(self, on_layer: Callable[[], None]) -> None:
        self.on_layer = on_layer
        self.config: SparseConfig | None = None  # None: dense
        self.seconds = 0.0
        self.stats: list[Stats] = []
        self.pictured: dict[int, tuple[Tensor, Tensor, float]] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None, "a whole prefill has no mask but the causal one"
        start = time.perf_counter()
        if self.config is None:
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            output, stats = attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True, config=self.config, return_stats=True
            )
            self.stats.append(stats)
        self.seconds += time.perf_counter() - start
        if module.layer_idx in PICTURED_LAYERS:
            self.pictured[module.layer_idx] = (query, key, scaling)
        self.on_layer()
        return output.transpose(1, 2).contiguous(), None

    def masks(self, config: SparseConfig) -> dict[int, BlockMask]:
        """The masks of the pictured layers in the last pass."""
        return {
            layer: predict_mask(query, key, is_causal=True, scale=scaling, enable_gqa=True, config=config)
            for layer, (query, key, scaling) in self.pictured.items()
        }


class Reader:
    """A model with the recorder in place of its attention."""

    def __init__(self, model: Any, on_layer: Callable[[], None]) -> None:
        self.model, self.recorder = model, AttentionRecorder(on_layer)
        register_attention("sparge_demo", self.recorder)
        model.set_attn_implementation("sparge_demo")

    @torch.inference_mode()
    def read(self, document: Document, config: SparseConfig | None, runs: int = 1) -> Reading:
        """Prefill (timed, the best of `runs`), then perplexity, best tokens and the needle (not timed)."""
        reading = Reading()
        for _ in range(runs):
            self.recorder.config, self.recorder.seconds, self.recorder.stats = config, 0.0, []
            start = time.perf_counter()
            hidden = self.model.model(document.ids, use_cache=False).last_hidden_state
            self.model.lm_head(hidden[:, -1:])
            seconds = time.perf_counter() - start
            if seconds < reading.seconds:
                reading.seconds, reading.attention_seconds = seconds, self.recorder.seconds
                reading.stats = self.recorder.stats
        loss, best = self._predictions(hidden[0, :-1], document.ids[0, 1:])
        reading.perplexity, reading.best_tokens = math.exp(loss), best
        answer = document.answer_tokens
        reading.needle_found = bool((best[-answer:] == document.ids[0, -answer:]).all())
        return reading

    def _predictions(self, hidden: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        total, best = 0.0, []
        for part, wanted in zip(hidden.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True):
            logits = self.model.lm_head(part)
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            best.append(logits.argmax(-1))
        return total / len(targets), torch.cat(best)


def summary(document: Document, dense: Reading, sparse: Reading) -> dict[str, Any]:
    """The comparison as plain numbers."""
    assert dense.best_tokens is not None
    assert sparse.best_tokens is not None
    return {
        "tokens": document.ids.shape[1],
        "dense_seconds": dense.seconds,
        "sparse_seconds": sparse.seconds,
        "speedup": dense.seconds / sparse.seconds,
        "dense_attention_seconds": dense.attention_seconds,
        "sparse_attention_seconds": sparse.attention_seconds,
        "attention_speedup": dense.attention_seconds / sparse.attention_seconds,
        "sparsity": sparse.sparsity,
        "dense_perplexity": dense.perplexity,
        "sparse_perplexity": sparse.perplexity,
        "perplexity_change": sparse.perplexity / dense.perplexity - 1,
        "same_best_token": (dense.best_tokens == sparse.best_tokens).float().mean().item(),
        "answer": document.answer,
        "dense_found_needle": dense.needle_found,
        "sparse_found_needle": sparse.needle_found,
        "backend": sparse.stats[0].backend,
        "quantization": sparse.stats[0].quantization,
    }


def draw_masks(masks: dict[int, BlockMask], path: Path, title: str) -> None:
    """One small picture per layer and head: dark is computed, light is skipped, white is the future."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(masks), len(PICTURED_HEADS), figsize=(3 * len(PICTURED_HEADS), 3.1 * len(masks)), layout="constrained"
    )
    first = next(iter(masks.values()))
    prefill = visibility(first.q_len, first.k_len, True, None, first.bits.device)
    for row, (layer, mask) in enumerate(sorted(masks.items())):
        kept, sparsity = mask.to_dense()[0], 1 - mask.kept_per_head / mask.visible_per_head
        visible = prefill.blocks(*mask.block)[0, 0]
        for column, head in enumerate(PICTURED_HEADS):
            shade = torch.where(visible, torch.where(kept[head], 1.0, 0.22), 0.0)
            panel = axes[row][column]
            panel.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            panel.set_title(f"layer {layer}, head {head}: {sparsity[0, head]:.0%} skipped", fontsize=9)
            panel.set_xticks([])
            panel.set_yticks([])
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
