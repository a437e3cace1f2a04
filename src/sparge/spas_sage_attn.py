"""The function names of the public SpargeAttn package, computed by sparge: change the import, keep the calls.

    from sparge.spas_sage_attn import spas_sage2_attn_meansim_topk_cuda

Arguments mean what they mean there, but: causal order is exact, not by whole blocks; top-k counts the blocks that a row
can see; `scale` holds for the prediction too; blocks of a mask are 128 rows x 64 keys on every GPU; the output has the
dtype of the inputs unless output_dtype says otherwise; attn_mask and dropout_p are honoured or refused. On a CPU
nothing is quantised. What the package's tuner does, sparge.tune does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.api import attention, block_sparse_attention
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

LAYOUTS = {"HND": "BHSD", "NHD": "BSHD"}
BLOCK = (128, 64)
TUNER = ("SparseAttentionMeansim", "extract_sparse_attention_state_dict", "load_sparse_attention_state_dict")

PerHead = float | Tensor
Function = Callable[..., Any]


@dataclass(frozen=True)
class Wanted:
    """How a caller wants the result."""

    tensor_layout: str
    output_dtype: torch.dtype | None
    return_sparsity: bool
    return_lse: bool

    def __post_init__(self) -> None:
        if self.tensor_layout not in LAYOUTS:
            raise ValueError(f"tensor_layout must be 'HND' or 'NHD', not {self.tensor_layout!r}.")
        if self.return_sparsity and self.return_lse:
            raise ValueError("return_sparsity and return_lse exclude each other: sparge.attention returns both.")

    def arguments(self) -> dict[str, Any]:
        """For the functions of sparge."""
        asked = {"return_lse": self.return_lse, "return_stats": self.return_sparsity}
        return {"layout": LAYOUTS[self.tensor_layout], "enable_gqa": True, **asked}

    def of(self, result: Any) -> Any:
        """The result that the caller expects, of what sparge returned."""
        output, *more = result if isinstance(result, tuple) else (result,)
        output = output if self.output_dtype is None else output.to(self.output_dtype)
        if self.return_sparsity:
            return output, float(more[0].sparsity)
        return (output, more[0]) if self.return_lse else output


def _by_topk(name: str, quantization: str, meaning: str) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        smooth_k: bool = True,
        simthreshd1: PerHead = -0.1,
        cdfthreshd: None = None,
        topk: PerHead = 0.5,
        pvthreshd: PerHead = 50,
        attention_sink: bool = False,
        tensor_layout: str = "HND",
        output_dtype: torch.dtype | None = None,
        return_sparsity: bool = False,
        return_lse: bool = False,
    ) -> Any:
        if cdfthreshd is not None:
            raise ValueError("cdfthreshd and topk exclude each other: use the function without topk in its name.")
        wanted = Wanted(tensor_layout, output_dtype, return_sparsity, return_lse)
        shared = _shared(q, quantization, smooth_k, simthreshd1, pvthreshd, attention_sink)
        config = SparseConfig(rule="topk", topk=topk, **shared)  # type: ignore[arg-type]
        result = attention(q, k, v, attn_mask, dropout_p, is_causal, scale, config=config, **wanted.arguments())
        return wanted.of(result)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"The share `topk` of the blocks with the best predicted scores; {meaning}."
    return function


def _by_cdf(name: str, quantization: str, meaning: str) -> Function:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        smooth_k: bool = True,
        simthreshd1: PerHead = 0.6,
        cdfthreshd: PerHead = 0.98,
        pvthreshd: PerHead = 50,
        attention_sink: bool = False,
        tensor_layout: str = "HND",
        output_dtype: torch.dtype | None = None,
        return_sparsity: bool = False,
        return_lse: bool = False,
    ) -> Any:
        wanted = Wanted(tensor_layout, output_dtype, return_sparsity, return_lse)
        shared = _shared(q, quantization, smooth_k, simthreshd1, pvthreshd, attention_sink)
        config = SparseConfig(rule="cdf", cdf=cdfthreshd, **shared)  # type: ignore[arg-type]
        result = attention(q, k, v, attn_mask, dropout_p, is_causal, scale, config=config, **wanted.arguments())
        return wanted.of(result)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"The best blocks up to the share `cdfthreshd` of predicted probability; {meaning}."
    return function


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention over the blocks that `mask_id` [batch, heads, rows / 128, keys / 64] marks; QK in int8, PV in fp8."""
    if not isinstance(mask_id, Tensor):
        raise TypeError(f"mask_id must be a tensor [batch, heads, rows / 128, keys / 64], not {mask_id!r}.")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p={dropout_p!r} is not supported: sparge is for inference; pass dropout_p=0.0.")
    wanted = Wanted(tensor_layout, output_dtype, return_sparsity, return_lse)
    axis = LAYOUTS[tensor_layout].index("S")
    kept = mask_id.bool()
    if _sinks(attention_sink):
        kept = torch.cat((torch.ones_like(kept[..., :1]), kept[..., 1:]), -1)
    mask = BlockMask.from_dense(kept, q.shape[axis], k.shape[axis], BLOCK)
    shared = _shared(q, "int8-fp8", smooth_k, -1.0, pvthreshd, attention_sink)
    result = block_sparse_attention(
        q, k, v, mask, scale=scale, quantization=shared["quantization"], pv_threshold=shared["pv_threshold"],
        **wanted.arguments(),
    )  # fmt: skip
    return wanted.of(result)


FP8, INT8 = "QK in int8 and PV in fp8", "QK in int8"
spas_sage2_attn_meansim_topk_cuda = _by_topk("spas_sage2_attn_meansim_topk_cuda", "int8-fp8", FP8)
spas_sage2_attn_meansim_cuda = _by_cdf("spas_sage2_attn_meansim_cuda", "int8-fp8", FP8)
spas_sage_attn_meansim_topk_cuda = _by_topk("spas_sage_attn_meansim_topk_cuda", "int8", INT8)
spas_sage_attn_meansim_cuda = _by_cdf("spas_sage_attn_meansim_cuda", "int8", INT8)


def __getattr__(name: str) -> Any:
    if name in TUNER:
        raise ImportError(f"sparge has no {name}: sparge.tune searches settings, and sparge.Profile keeps them.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _shared(
    q: Tensor, quantization: str, smooth_k: bool, simthreshd1: PerHead, pvthreshd: PerHead, attention_sink: bool
) -> dict[str, Any]:
    """The settings that all functions have, in sparge's words: the paper's predictor, thresholds as natural logs."""
    if smooth_k is not True:
        raise ValueError("smooth_k must be True: sparge always takes the mean key out of K, which changes no result.")
    on_gpu = isinstance(q, Tensor) and q.device.type == "cuda"
    return {
        "block": BLOCK,
        "subblocks": (1, 1),
        "sinks": _sinks(attention_sink),
        "similarity": simthreshd1,
        "pv_threshold": _drop(pvthreshd),
        "quantization": quantization if on_gpu else "none",
    }


def _sinks(attention_sink: bool) -> int:
    if not isinstance(attention_sink, bool):
        raise TypeError(f"attention_sink must be True or False, not {attention_sink!r}.")
    return int(attention_sink)


def _drop(pvthreshd: PerHead) -> float | list[float]:
    """There a positive number of powers of two; here a negative natural logarithm."""
    values = pvthreshd.tolist() if isinstance(pvthreshd, Tensor) else pvthreshd
    numbers = values if isinstance(values, list) else [values]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise ValueError(f"pvthreshd must be above 0, one number or one per head, not {pvthreshd!r}.")
    natural = [-math.log(2) * number for number in numbers]
    return natural if isinstance(values, list) else natural[0]
