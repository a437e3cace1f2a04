"""The dense attention that sparge is measured against: the fastest that torch has for each call, cuDNN where it can."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from sparge.integrations.torch_sdpa import torch_attention


@dataclass(frozen=True)
class Way:
    """One of torch's kernels; where it refuses grouped heads, K and V can be repeated for it."""

    name: str
    kernel: SDPBackend
    repeats: bool = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        if self.repeats:
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
            arguments = {**arguments, "enable_gqa": False}
        with sdpa_kernel(self.kernel):
            output: Tensor = torch_attention(query, key, value, **arguments)
        return output


WAYS = (
    Way("cuDNN", SDPBackend.CUDNN_ATTENTION),
    Way("cuDNN, K and V repeated", SDPBackend.CUDNN_ATTENTION, repeats=True),
    Way("FlashAttention 2", SDPBackend.FLASH_ATTENTION),
    Way("memory-efficient", SDPBackend.EFFICIENT_ATTENTION),
    Way("math", SDPBackend.MATH),
)
ON_CPU = "torch SDPA"


def kind_of(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Hashable:
    """Equal for calls that take as long."""
    tensors = tuple((x.shape, x.stride(), x.dtype) for x in (query, key, value))
    mask = arguments["attn_mask"]
    rest = tuple(value for name, value in arguments.items() if name != "attn_mask")
    return (*tensors, None if mask is None else (mask.shape, mask.dtype), *rest)


class DenseAttention:
    """Has the arguments of torch's function, those after value by name."""

    def __init__(self) -> None:
        self._ways: dict[Hashable, Way] = {}
        self._idle: Any = WeakTensorKeyDictionary()  # whether a mask hides nothing: reading it waits for the device

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        arguments = self._without_idle_mask(arguments)
        if not query.is_cuda:
            output: Tensor = torch_attention(query, key, value, **arguments)
            return output
        kind = kind_of(query, key, value, arguments)
        if kind not in self._ways:
            self._ways[kind] = _first_way(query, key, value, arguments)
        return self._ways[kind].attend(query, key, value, arguments)

    def kernel(self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> str:
        """Who computes a call that has been made before."""
        if not query.is_cuda:
            return ON_CPU
        return self._ways[kind_of(query, key, value, self._without_idle_mask(arguments))].name

    def _without_idle_mask(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """HunyuanVideo hands over a mask even for a prompt without padding; kernels are faster without."""
        mask = arguments["attn_mask"]
        if mask is None or mask.dtype != torch.bool:
            return arguments
        if mask not in self._idle:
            self._idle[mask] = bool(mask.all())
        return {**arguments, "attn_mask": None} if self._idle[mask] else arguments


def _first_way(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Way:
    refusal: RuntimeError | None = None
    for way in WAYS:
        if way.repeats and not arguments["enable_gqa"]:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains at length which kernels it did not take
                way.attend(query, key, value, arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            refusal = error
        else:
            return way
    raise RuntimeError(f"no kernel of torch takes this call: {refusal}")
