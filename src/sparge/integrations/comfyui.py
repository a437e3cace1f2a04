"""A node of ComfyUI that makes the attention of a diffusion model sparse.

ComfyUI is not needed to import this file. In its `custom_nodes` folder, a file `sparge_attention.py` with one line is
all that is needed:

    from sparge.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparge.api import attention
from sparge.config import SparseConfig
from sparge.integrations.fallback import FEW_ROWS, as_autocast, refusal, warn_once

OVERRIDE = "optimized_attention_override"  # where ComfyUI's attention looks for a replacement of itself
UNDERSTOOD = {"transformer_options", "_inside_attn_wrapper", "scale", "enable_gqa", "low_precision_attention"}
LAYER = "Attention of ComfyUI"


class SpargeAttention:
    """MODEL in, MODEL out: self-attention of the model goes to sparge, everything else stays as it is."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "model_patches/attention"
    DESCRIPTION = "Training-free sparse attention. Higher gap and lower share: closer to dense, slower."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (ComfyUI's name)
        tokens = ("INT", {"default": 0, "min": 0, "max": 65536})
        return {
            "required": {
                "model": ("MODEL",),
                "gap": ("FLOAT", {"default": SparseConfig.gap, "min": 0.0, "max": 50.0, "step": 0.5}),
                "share": ("FLOAT", {"default": SparseConfig.probe, "min": 0.0, "max": 1.0, "step": 0.0001}),
                "text_before": tokens,
                "text_after": tokens,
                "dense_steps": ("INT", {"default": 0, "min": 0, "max": 1000}),
            }
        }

    def apply(
        self, model: Any, gap: float, share: float, text_before: int, text_after: int, dense_steps: int
    ) -> tuple[Any]:
        """A copy of the model with sparge as its attention; text tokens at either end are seen by all, and see all."""
        text = [(0, text_before)] * bool(text_before) + [(-text_after, None)] * bool(text_after)
        config = SparseConfig(gap=gap, probe=share, protected=tuple(text))
        changed = model.clone()
        options = changed.model_options.setdefault("transformer_options", {})
        changed.model_options["transformer_options"] = {**options, OVERRIDE: Override(config, dense_steps)}
        return (changed,)


class Override:
    """What ComfyUI calls in place of its attention function; what sparge does not compute goes back to that."""

    known: ClassVar[Any] = WeakTensorKeyDictionary()  # steps by tensor of sigmas: reading one waits for the device

    def __init__(self, config: SparseConfig, dense_steps: int = 0) -> None:
        self.config, self.dense_steps = config, dense_steps

    def __call__(
        self,
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **more: Any,
    ) -> Tensor:
        given = (q, k, v)
        if not skip_reshape:  # [B, S, H * D]
            q, k, v = (x.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for x in given)
        output: Tensor | str | None = None
        if q.shape[2] == k.shape[2] and q.shape[2] > FEW_ROWS:  # else cross-attention, or too short to gain
            output = self._sparse(q, k, v, mask, attn_precision, more)
        if isinstance(output, Tensor):
            return output if skip_output_reshape else output.transpose(1, 2).flatten(2)
        if output is not None:
            warn_once(LAYER, output)
        dense: Tensor = func(
            *given, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
            skip_output_reshape=skip_output_reshape, **more,
        )  # fmt: skip
        return dense

    def _sparse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, precision: torch.dtype | None, more: dict[str, Any]
    ) -> Tensor | str | None:
        """The output, or why not; None: as asked."""
        if mask is not None:
            return "it has a mask, which ComfyUI does not tell the meaning of."
        if precision is not None and precision != q.dtype:
            return f"ComfyUI wants it computed in {precision}."
        unknown = set(more) - UNDERSTOOD
        if unknown:
            return f"sparge does not know ComfyUI's argument {min(unknown)}."
        step = self._step(more.get("transformer_options") or {})
        if isinstance(step, str) or step < self.dense_steps:
            return step if isinstance(step, str) else None
        exact = more.get("low_precision_attention") is False
        config = replace(self.config, quantization="none") if exact else self.config
        gqa = bool(more.get("enable_gqa", False))
        arguments: dict[str, Any] = {"scale": more.get("scale"), "enable_gqa": gqa}
        q, k, v = as_autocast(q, k, v)
        reason = refusal(q, k, v, config, **arguments)
        if reason is not None:
            return reason
        output: Tensor = attention(q, k, v, **arguments, config=config)
        return output

    def _step(self, options: dict[str, Any]) -> int | str:
        """The step that the sampler is in, or why it is not known; not looked for if no step is to be dense."""
        if self.dense_steps == 0:
            return 0
        now, schedule = options.get("sigmas"), options.get("sample_sigmas")
        if not isinstance(now, Tensor) or not isinstance(schedule, Tensor):
            return "the sampler does not say which step it is in, and dense_steps are asked for."
        if now not in self.known:
            self.known[now] = int((schedule.to(now.device) > now.flatten()[0]).sum())
        step: int = self.known[now]
        return step


NODE_CLASS_MAPPINGS = {"SpargeAttention": SpargeAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SpargeAttention": "Sparse attention (sparge)"}
