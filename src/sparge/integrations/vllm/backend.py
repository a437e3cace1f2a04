"""vLLM's FlashAttention backend, with sparge in its place for long prefills. Only vLLM imports this file.

Decoding steps, short requests and layers that sparge does not compute (sliding windows, soft-capping, sinks, ALiBi,
quantised KV caches) are vLLM's own. Written against vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from sparge.config import SparseConfig
from sparge.integrations.fallback import warn_once
from sparge.integrations.vllm.prefill import Request, attend, requests_of, rows_of

REQUESTS = "sparge_requests"  # the attribute of a batch's metadata
SPECIAL = ("alibi_slopes", "sinks", "logits_soft_cap")  # of a layer; None or 0: it has none


class SpargeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Says of itself what FlashAttention says; vLLM keeps `is_sparse` for models that choose their keys."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return SpargeImpl

    @staticmethod
    def get_builder_cls() -> type:
        return SpargeMetadataBuilder


class SpargeMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Also notes the requests of a batch, from numbers that are on the CPU anyway."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # a graph cannot choose who is sparse

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound  # exact for prefills
        known = () if lengths is None else requests_of(common_attn_metadata.query_start_loc_cpu, lengths)
        setattr(metadata, REQUESTS, known)
        return metadata


class SpargeImpl(FlashAttentionImpl):  # type: ignore[misc]
    """One attention layer. Settings are those of `--additional-config '{"sparge": {...}}'`, as for SparseConfig."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        running = get_current_vllm_config_or_none()
        more = getattr(running, "additional_config", None) or {}
        self.sparge_config = SparseConfig(**more.get("sparge", {})) if isinstance(more, dict) else SparseConfig()

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        scales = (output_scale, output_block_scale)
        requests: tuple[Request, ...] = getattr(attn_metadata, REQUESTS, ())
        done = self._attend_long_prefills(requests, query, kv_cache, attn_metadata, output, scales)
        rest = tuple(request for request in requests if request not in done)
        if not done:
            dense: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            return dense
        if rest:
            self._dense(rest, layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _attend_long_prefills(
        self,
        requests: tuple[Request, ...],
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        scales: tuple[Any, Any],
    ) -> tuple[Request, ...]:
        """Writes their output, and returns those that it was written for."""
        long = [request for request in requests if request.is_long_prefill]
        reason = self._why_dense(kv_cache, metadata, scales) if long else None
        done = []
        for request in long if reason is None else ():
            result = attend(request, query, kv_cache, metadata.block_table, self.scale, self.sparge_config)
            if isinstance(result, str):
                reason = result
                break
            rows = output[request.start : request.stop]
            rows.copy_(result.reshape(rows.shape))
            done.append(request)
        if reason is not None:
            warn_once("Attention of vLLM", reason)
        return tuple(done)

    def _dense(
        self,
        rest: tuple[Request, ...],
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
    ) -> None:
        """vLLM's own attention for some requests of a batch: a batch of their own."""
        rows = rows_of(rest, query.device)
        chosen = torch.tensor([request.index for request in rest], device=query.device)
        ends = torch.tensor([0, *(request.rows for request in rest)]).cumsum(0)
        smaller = replace(
            metadata,
            num_actual_tokens=len(rows),
            max_query_len=max(request.rows for request in rest),
            query_start_loc=ends.to(metadata.query_start_loc),
            seq_lens=metadata.seq_lens[chosen],
            block_table=metadata.block_table[chosen],
            slot_mapping=metadata.slot_mapping[rows],
            scheduler_metadata=None,  # planned for the whole batch
        )
        own = output.new_empty(len(rows), *output.shape[1:])
        key, value = (None if x is None else x[rows] for x in (key, value))  # layers may share another's keys
        super().forward(layer, query[rows], key, value, kv_cache, smaller, own)
        output[rows] = own

    def _why_dense(self, kv_cache: Tensor, metadata: Any, scales: tuple[Any, Any]) -> str | None:
        if self.attn_type != "decoder":
            return f"its attention type is {self.attn_type}."
        special = [name for name in SPECIAL if isinstance(getattr(self, name), Tensor) or getattr(self, name)]
        if self.sliding_window != (-1, -1):
            special.append("sliding_window")
        if special:
            return f"its layers have {special[0]}, which sparge leaves to vLLM."
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size or kv_cache.shape[1] != self.num_kv_heads:
            return f"its KV cache of shape {tuple(kv_cache.shape)} is not [pages, KV heads, tokens, K and V]."
        if metadata.causal is not True or any(x is not None for x in scales) or self._is_special(metadata):
            return "its batch is more than causal attention."
        return None

    def _is_special(self, metadata: Any) -> bool:
        """Batches that say more than which tokens belong to whom."""
        ranges = (getattr(metadata, name, None) for name in ("mm_prefix_query_range_tensor", "rswa_prefix_lens"))
        return getattr(self, "dcp_world_size", 1) > 1 or any(x is not None for x in ranges)
