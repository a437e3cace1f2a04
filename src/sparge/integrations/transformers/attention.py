"""The attention function of attn_implementation="sparge": sparse where sparge can, else dense, and it says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.api import attention
from sparge.config import SparseConfig
from sparge.distributed.context import in_block
from sparge.inputs import Window
from sparge.integrations.fallback import FEW_ROWS, as_autocast, refusal, refuse_dense_shard, warn_once
from sparge.integrations.layers import LayerSettings
from sparge.integrations.transformers.interface import implementation_before
from sparge.integrations.transformers.mask import PatternMask, check_model
from sparge.visibility import UNBOUNDED, Visibility

NAME = "sparge"  # among transformers' attention implementations
SETTINGS = "sparge_settings"  # the attribute of a patched layer
EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")

# What a layer may hand over that changes its result, and who computes that: the model's own eager function, or
# transformers' sdpa function. sparge and torch's attention know none of it.
EAGER_ONLY = {
    "softcap": "its scores are soft-capped.",
    "s_aux": "its softmax has attention sinks.",
    "output_attentions": "attention weights were asked for.",
}
SDPA_ONLY = {
    "position_bias": "its scores have a position bias.",
    "cache": "its keys are in a paged cache.",
}
NOBODY = ("indices", "block_indices")  # keys chosen by the model itself


DEFAULT = LayerSettings(SparseConfig())


@dataclass(frozen=True)
class Seen:
    """What a mask lets the rows see, in the words of sparge.attention; keys from `keys` on are hidden."""

    keys: int
    is_causal: bool
    window: Window | None = None
    padding: Tensor | None = None  # [B, 1, 1, keys]


def sparge_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Q, K and V come heads first with un-repeated KV heads; the output is [B, S, H, D]."""
    handed_over = {name for name, value in more.items() if value is not None and value is not False}
    for name in handed_over.intersection(NOBODY):
        raise ValueError(
            f"{type(module).__name__} chooses its keys itself ({name}), which sparge does not follow: "
            'use attn_implementation="sdpa" or "eager".'
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    settings: LayerSettings = getattr(module, SETTINGS, None) or _settings_by_name(module)
    worth_it = query.shape[2] > FEW_ROWS or in_block()
    if worth_it and settings.config is not None:
        reason = _special(handed_over, dropout)
        seen = _seen(attention_mask, query, key, causal) if reason is None else reason
        output = seen if isinstance(seen, str) else _sparse(query, key, value, seen, scaling, settings)
        if not isinstance(output, str):
            return output, None
        refuse_dense_shard(output)
        warn_once(type(module).__name__, output)
    refuse_dense_shard(f"the profile leaves {type(module).__name__} dense.")
    dense = _eager if handed_over.intersection(EAGER_ONLY) else _sdpa
    return dense(module, query, key, value, attention_mask, dropout, scaling, causal, more)


def _settings_by_name(module: Any) -> LayerSettings:
    """Of a layer that no patch has touched: the default, unless its config is shared with a patched model's."""
    config = getattr(module, "config", None)
    if config is None or torch.compiler.is_compiling():
        return DEFAULT
    check_model(type(config))
    return DEFAULT if implementation_before(config) in (None, NAME) else LayerSettings(None)


def _sparse(
    query: Tensor, key: Tensor, value: Tensor, seen: Seen, scaling: float | None, settings: LayerSettings
) -> Tensor | str:
    """The output [B, S, H, D], or why not."""
    assert settings.config is not None
    config = EXACT if seen.window is not None and not settings.tuned else settings.config
    query, key, value = as_autocast(query, key[:, :, : seen.keys], value[:, :, : seen.keys])
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    arguments: dict[str, Any] = {
        "attn_mask": seen.padding, "is_causal": seen.is_causal, "scale": scaling, "enable_gqa": True,
        "window": seen.window, "layout": "BSHD",
    }  # fmt: skip
    reason = refusal(query, key, value, config, **arguments)
    if reason is not None:
        return reason
    output: Tensor = attention(query, key, value, config=config, **arguments)
    return output.contiguous()


def _special(handed_over: set[str], dropout: float) -> str | None:
    for name, reason in (EAGER_ONLY | SDPA_ONLY).items():
        if name in handed_over:
            return reason
    return "it drops attention weights at random (training)." if dropout else None


def _seen(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Seen | str:
    """What the mask lets each row see, or why sparge cannot say that."""
    q_len, k_len = query.shape[2], key.shape[2]
    if mask is None:
        causal = causal and q_len > 1
        if causal and k_len < q_len:
            return "its causal order has more rows than keys."
        return Seen(q_len if causal else k_len, causal)  # keys after the rows: room left in a static cache
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into its mask."
    if isinstance(mask, PatternMask) and mask.pattern is not None:
        return _seen_by_pattern(mask.pattern.visible) if mask.shape[-1] == k_len else "its mask is for other keys."
    if mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:] == (1, 1, k_len):
        return Seen(k_len, False, padding=mask)
    return "its mask is more than causal order, a sliding window and key padding."


def _seen_by_pattern(sight: Visibility) -> Seen:
    padding = None if sight.key_valid is None else sight.key_valid[:, None, None, :]
    causal = sight.right == 0
    left = None if sight.left == UNBOUNDED else sight.left
    right = None if sight.right == UNBOUNDED or causal else sight.right
    window = None if left is None and right is None else (left, right)
    return Seen(sight.k_len, causal, window, padding)


# ---- dense attention, as the model would have it without sparge


def _sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = mask.whole() if isinstance(mask, PatternMask) else mask
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **more
    )
    return result


def _eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The model's own function in plain torch, which takes additive masks and never leaves the causal one out."""
    function = _eager_function(type(module))
    if function is None:
        names = ", ".join(sorted(set(more).intersection(EAGER_ONLY)))
        raise ValueError(f"{type(module).__name__} needs {names}, which sparge lacks, and has no eager attention.")
    mask = mask.whole() if isinstance(mask, PatternMask) else mask
    q_len, k_len = query.shape[2], key.shape[2]
    if mask is None and causal and q_len > 1:
        rows = torch.arange(q_len, device=query.device)[:, None]
        mask = (torch.arange(k_len, device=query.device) <= rows)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    result: tuple[Tensor, Tensor | None] = function(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **more
    )
    return result


def _eager_function(kind: type) -> Callable[..., Any] | None:
    """`eager_attention_forward` of the file that a layer's class, or one it inherits from, is defined in."""
    for ancestor in kind.__mro__:
        function: Callable[..., Any] | None = getattr(
            sys.modules.get(ancestor.__module__), "eager_attention_forward", None
        )
        if function is not None:
            return function
    return None
