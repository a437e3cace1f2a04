"""`sparge::attention` as one torch operator, so that torch.compile(fullgraph=True) sees a single call.

The operator takes plain values (the config as JSON) and runs the ordinary pipeline; its fake kernel only knows shapes.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.inputs import Window
from sparge.stages import Stats

NO_LIMIT = -1


@functools.lru_cache(maxsize=256)
def _decode(config: str) -> SparseConfig:
    return SparseConfig.of_settings(json.loads(config))


@torch.library.custom_op("sparge::attention", mutates_args=())
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    left: int,
    right: int,
    layout: str,
    config: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, LSE, executed, visible, skipped_pv, error, redone; what is not asked for is empty."""
    from sparge.api import attention

    output, *lses, stats = attention(
        query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
        config=_decode(config), window=(left, right), layout=layout, return_lse=return_lse, return_stats=True,
    )  # fmt: skip
    lse = lses[0] if lses else query.new_empty(0, dtype=torch.float32)
    error, redone = stats.error, stats.redone
    if error is None or redone is None:
        error, redone = query.new_empty(0, dtype=torch.float32), query.new_empty(0, dtype=torch.bool)
    return output, lse, stats.executed.clone(), stats.visible.clone(), stats.skipped_pv, error, redone


@attention_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    left: int,
    right: int,
    layout: str,
    config: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, first, second, _ = query.shape
    heads, length = (first, second) if layout == "BHSD" else (second, first)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty((batch, heads, length) if return_lse else (0,), dtype=torch.float32)
    counts = [query.new_empty(batch, heads, dtype=torch.int64) for _ in range(3)]
    judged = (0,) if _decode(config).max_error is None else (batch, heads)
    error, redone = query.new_empty(judged, dtype=torch.float32), query.new_empty(judged, dtype=torch.bool)
    return output, lse, counts[0], counts[1], counts[2], error, redone


def is_traced() -> bool:
    """Whether torch.compile, make_fx, export or jit.trace is recording: it must see one operator, not our memory."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    config: SparseConfig | None,
    window: Window | None,
    layout: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Stats]:
    """What `attention` does while torch.compile traces it."""
    sides = (NO_LIMIT, NO_LIMIT) if window is None else window
    left, right = (NO_LIMIT if side is None else side for side in sides)
    encoded = "{}" if config is None else config.encoded
    results: Any = attention_op(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, left, right, layout, encoded, return_lse
    )
    output, lse, executed, visible, skipped_pv, error, redone = results
    unknown = "chosen when the compiled code runs"
    judged = (None, None) if config is None or config.max_error is None else (error, redone)
    return output, lse, Stats(executed, visible, skipped_pv, unknown, unknown, unknown, *judged)
