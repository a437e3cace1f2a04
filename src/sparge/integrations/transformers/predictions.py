"""What a language model predicts, from its last hidden states, some rows of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = {"cpu": 256, "cuda": 4096}  # of logits held in memory


def stretches(rows: int, device: torch.device) -> Iterator[slice]:
    """All rows, as many at a time as memory should hold logits of."""
    step = ROWS_AT_ONCE.get(device.type, ROWS_AT_ONCE["cpu"])
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """What the model makes of hidden states [rows, width], with all that it does to logits (caps, scales).

    The model reads one token, and its hidden states are exchanged for these.
    """

    def exchange(module: Any, arguments: Any, output: Any) -> Any:
        output.last_hidden_state = hidden[None]
        return output

    handle = model.base_model.register_forward_hook(exchange)
    try:
        logits: Tensor = model(torch.zeros(1, 1, dtype=torch.long, device=hidden.device), use_cache=False).logits
    finally:
        handle.remove()
    return logits[0].float()


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each row of log probabilities from the dense model's, in nats."""
    return (dense.exp() * (dense - other)).sum(-1)
