"""One batch of vLLM: which requests are long prefills, and their attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparge.api import attention
from sparge.config import SparseConfig
from sparge.integrations.fallback import FEW_ROWS, refusal

LONG = 2048  # keys; shorter requests gain less than it costs to take their keys out of the pages


@dataclass(frozen=True)
class Request:
    """Rows start ... stop of the batch are the last tokens of a sequence of `length`."""

    index: int
    start: int
    stop: int
    length: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def is_long_prefill(self) -> bool:
        return self.rows > FEW_ROWS and self.length >= LONG


def requests_of(starts: Tensor, lengths: Tensor) -> tuple[Request, ...]:
    """From query_start_loc and seq_lens, both on the CPU."""
    ends: list[int] = starts.tolist()
    return tuple(
        Request(index, start, stop, length)
        for index, ((start, stop), length) in enumerate(zip(pairwise(ends), lengths.tolist(), strict=False))
        if stop > start
    )


def keys_and_values(kv_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A sequence out of its pages [page, KV heads, tokens, K and V channels]: each [1, length, KV heads, channels]."""
    together = kv_cache[pages].transpose(1, 2).flatten(0, 1)[:length]
    key, value = together[None].chunk(2, -1)
    return key, value


def attend(
    request: Request, query: Tensor, kv_cache: Tensor, block_table: Tensor, scale: float, config: SparseConfig
) -> Tensor | str:
    """The output [rows, heads, channels] of a prefill, or why sparge cannot compute it."""
    page = kv_cache.shape[2]
    pages = block_table[request.index, : -(-request.length // page)]
    key, value = keys_and_values(kv_cache, pages, request.length)
    rows = query[None, request.start : request.stop]
    reason = refusal(rows, key, value, config, is_causal=True, scale=scale, enable_gqa=True, layout="BSHD")
    if reason is not None:
        return reason
    output: Tensor = attention(
        rows, key, value, is_causal=True, scale=scale, enable_gqa=True, config=config, layout="BSHD"
    )  # rows align with the last keys
    return output[0]


def rows_of(requests: tuple[Request, ...], device: torch.device) -> Tensor:
    """Which rows of the batch are theirs."""
    parts = [torch.arange(request.start, request.stop) for request in requests]
    return torch.cat(parts).to(device)
