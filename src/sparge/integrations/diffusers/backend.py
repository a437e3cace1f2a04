"""The attention of diffusers' models by sparge: through the dispatcher, or where a model calls torch by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparge.api import attention
from sparge.config import SparseConfig
from sparge.distributed.context import context_parallel
from sparge.integrations.diffusers.order import Layout
from sparge.integrations.diffusers.running import Forward, RunningLayer, current
from sparge.integrations.fallback import FEW_ROWS, as_autocast, refusal, refuse_dense_shard, warn_once
from sparge.integrations.layers import LayerSettings
from sparge.integrations.torch_sdpa import torch_attention
from sparge.profile import SETTINGS

NAME = "sparge"
DEFAULT = RunningLayer("Attention by the name of sparge", LayerSettings(SparseConfig()))


@dataclass(frozen=True)
class Dense:
    """The call has to be dense; without a reason, as it was meant to be."""

    reason: str | None = None


def sparge_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The function behind the name "sparge" in diffusers' dispatcher; tensors are [B, S, H, D]."""
    if return_lse:
        raise ValueError('the attention backend "sparge" has no return_lse: use sparge.attention(return_lse=True).')
    arguments = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if _parallel_config is None:
        return _attend(query, key, value, attn_mask, arguments)
    return _over_devices(query, key, value, attn_mask, arguments, _parallel_config)


def sdpa_of_layer(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    """What torch's function does inside a layer that does not use the dispatcher; tensors are [B, H, S, D]."""
    forward = current()
    assert forward is not None
    assert forward.layer is not None
    attn_mask = arguments.pop("attn_mask")
    output = _sparse(query, key, value, attn_mask, arguments, forward.layer, forward, layout="BHSD")
    if not isinstance(output, Dense):
        return output
    _say(forward.layer, output)
    return torch_attention(query, key, value, attn_mask=attn_mask, **arguments)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    arguments: dict[str, Any],
    shards: int = 1,
    first_head: int = 0,
) -> Tensor:
    """Sparse, or as the layer would have it without sparge."""
    forward = None if torch.compiler.is_compiling() else current()  # a compiled layer has no patch
    layer = DEFAULT if forward is None or forward.layer is None else forward.layer
    known = forward if layer is not DEFAULT else None
    layer = replace(layer, settings=_for_heads(layer.settings, first_head, query.shape[2])) if shards > 1 else layer
    output = _sparse(query, key, value, attn_mask, arguments, layer, known, layout="BSHD", shards=shards)
    if not isinstance(output, Dense):
        return output
    _say(layer, output)
    return _by_diffusers(query, key, value, attn_mask, arguments, layer.dense_backend)


def _sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    arguments: dict[str, Any],
    layer: RunningLayer,
    forward: Forward | None,  # None: sparge was asked for by name, and nothing is known of the tokens
    layout: str,
    shards: int = 1,
) -> Tensor | Dense:
    axis = layout.index("S")
    length, config = query.shape[axis], layer.settings.config
    if config is None or length <= FEW_ROWS or length != key.shape[axis]:  # the last: cross-attention
        return Dense()
    mask = attn_mask
    if mask is not None and mask.shape == (query.shape[0], length):  # as diffusers' native attention
        mask = mask[:, None, None, :]
    order = None
    if forward is not None:
        place = _place(forward, length, shards)
        if isinstance(place, Dense):
            return place
        config = _protecting(config, place.text_range(length))
        order = None if forward.in_order else place.order(length, query.device)
    query, key, value = as_autocast(query, key, value)
    asked = query, key, value
    if layer.attend is not None:
        asked = query.detach(), key.detach(), value.detach()  # only sparge's own attention has no gradients
    reason = refusal(*asked, config, attn_mask=mask, **arguments, layout=layout)
    if reason is not None:
        return Dense(reason)
    if order is not None:
        query, key, value = (order.apply(x, axis) for x in (query, key, value))
        mask = None if mask is None else order.apply(mask, -1)
    compute = layer.attend or attention
    if layer.attend is None and forward is not None and forward.attention is not None:
        compute = partial(forward.attention, layer.name)
    output: Tensor = compute(query, key, value, mask, **arguments, config=config, layout=layout)
    return output if order is None else order.restore(output, axis)


def _place(forward: Forward, length: int, shards: int) -> Layout | Dense:
    if isinstance(forward.layout, str):
        return Dense(forward.layout)
    if length < forward.layout.visual:
        return Dense(f"its {length} tokens are fewer than the {forward.layout.visual} of the picture.")
    return replace(forward.layout, shards=shards) if shards > 1 else forward.layout


@lru_cache(maxsize=256)
def _protecting(config: SparseConfig, text: tuple[int, int]) -> SparseConfig:
    """Text is seen by all, and sees all."""
    return config if text[0] == text[1] else replace(config, protected=(*config.protected, text))


def _for_heads(settings: LayerSettings, first: int, count: int) -> LayerSettings:
    """The settings of the heads that are on this device."""
    if settings.config is None:
        return settings
    values = {name: getattr(settings.config, name) for name in SETTINGS}
    cut: dict[str, Any] = {
        name: value[first : first + count] for name, value in values.items() if isinstance(value, tuple)
    }
    return replace(settings, config=replace(settings.config, **cut)) if cut else settings


def _say(layer: RunningLayer, dense: Dense) -> None:
    if dense.reason is not None:
        refuse_dense_shard(dense.reason)
        warn_once(layer.kind, dense.reason)


def _by_diffusers(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, arguments: dict[str, Any], backend: Any
) -> Tensor:
    from diffusers.models import attention_dispatch as host

    if backend is None:
        backend, _ = host._AttentionBackendRegistry.get_active_backend()
    if backend == NAME:
        backend = host.AttentionBackendName.NATIVE
    output: Tensor = host.dispatch_attention_fn(query, key, value, attn_mask, **arguments, backend=backend)
    return output


# ---- a sequence split over devices


def _over_devices(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, arguments: dict[str, Any], parallel: Any
) -> Tensor:
    """Ulysses by diffusers: every device gets the whole sequence for some of the heads. A ring by sparge."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    split = parallel.context_parallel_config
    if getattr(split, "ulysses_anything", False):
        raise ValueError(
            "sparge takes diffusers' context parallelism without ulysses_anything, which does not say where tokens "
            "stand."
        )
    if split.ring_degree > 1:
        return _ring(query, key, value, attn_mask, arguments, split)
    output: Tensor = _templated_context_parallel_attention(
        query, key, value, attn_mask, **arguments, forward_op=_ulysses, backward_op=_no_backward,
        _parallel_config=parallel,
    )  # fmt: skip
    return output


def _ring(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, arguments: dict[str, Any], split: Any
) -> Tensor:
    """sparge's own: diffusers' would choose among the keys of one device at a time."""
    forward = None if torch.compiler.is_compiling() else current()
    if forward is not None and forward.layer is not None:
        raise ValueError(
            "a patched model takes ulysses_degree, not ring_degree: its tokens attend along a Hilbert curve, which "
            'runs through all devices; with ring_degree, set_attention_backend("sparge") without a patch.'
        )
    if attn_mask is not None:
        raise ValueError("sparge takes no attn_mask with ring_degree: it does not say which device's keys it is for.")
    with context_parallel(split._mesh["ring", "ulysses"]):
        output: Tensor = attention(query, key, value, **arguments, config=DEFAULT.settings.config, layout="BSHD")
    return output


def _ulysses(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor:
    split = _parallel_config.context_parallel_config
    arguments = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    first_head = split._ulysses_mesh.get_local_rank() * query.shape[2]
    return _attend(query, key, value, attn_mask, arguments, split.ulysses_degree, first_head)


def _no_backward(*_: Any, **__: Any) -> Any:
    raise RuntimeError("sparge has no backward pass: run the model under torch.no_grad().")
