"""The named values that travel between the stages: Blocks (summarize), Output (attend), Stats (to the caller)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge.inputs import Inputs
from sparge.quantization import Quantized


@dataclass
class PutOff:
    """Passes of a summary that run beside something else, or when they are needed; each runs once."""

    passes: dict[str, Callable[[Any, Sequence[int]], None]]  # by kind, in their order
    operands: Any = None  # what they read and write, as the backend gives it to kernels
    addresses: Sequence[int] = ()


@dataclass(frozen=True)
class Blocks:
    """What one read of Q, K and V leaves behind. a x b sub-blocks per block, D channels."""

    inputs: Inputs
    q_means: Tensor  # bfloat16 [B, Hq, query blocks, a, D]
    k_means: Tensor  # bfloat16 [B, Hkv, b, key blocks, D], of the smoothed keys
    v_finite: Tensor  # bool [B, Hkv, key blocks]
    q_similarity: Tensor | None  # float32 [B, Hq, query blocks]
    k_similarity: Tensor | None  # float32 [B, Hkv, key blocks]
    quantized: Quantized | None
    block: tuple[int, int]
    probed: Tensor | None = None  # float16 [B, Hq, 1 + query blocks, key blocks], if known: see reference.probe
    put_off: PutOff | None = None  # of the copies of values, and of v_finite

    def finish(self) -> None:
        """Whatever was put off and has not run."""
        if self.put_off is not None:
            for kind in tuple(self.put_off.passes):
                self.put_off.passes.pop(kind)(self.put_off.operands, self.put_off.addresses)

    @property
    def k_filled(self) -> Tensor:
        """bool [B or 1, b, key blocks]: sub-blocks that hold a valid key."""
        b, blocks = self.k_means.shape[2:4]
        sight = self.inputs.visibility
        valid = sight.key_valid
        if valid is None:
            valid = torch.ones(1, sight.k_len, dtype=torch.bool, device=sight.device)
        padded: Tensor = torch.nn.functional.pad(valid, (0, blocks * self.block[1] - sight.k_len))
        filled: Tensor = padded.unflatten(1, (blocks, b, -1)).any(-1)
        return filled.transpose(1, 2)


@dataclass(frozen=True)
class Output:
    """What the attention stage computed, before the caller's layout is restored."""

    values: Tensor  # [B, Hq, Nq, Dv], the input dtype
    lse: Tensor | None  # float32 [B, Hq, Nq], natural log; None where the inputs do not ask for it
    skipped_pv: Tensor  # int64 [B, Hq]: (64-row group, key block) pairs left out by the second stage


@dataclass(frozen=True)
class Redo:
    """Some heads to compute anew, into an output that has the others already."""

    heads: Tensor  # bool [B, Hq]
    output: Output


@dataclass(frozen=True)
class Stats:
    """What one call did. Tensors stay on the device; reading them is the caller's synchronisation.

    sparsity    share of visible blocks skipped, over all heads (0-d float32)
    executed    blocks computed, per batch entry and query head (int64 [B, Hq])
    visible     blocks that hold at least one visible pair (int64 [B, Hq])
    skipped_pv  64-row groups of executed blocks whose P V the second stage left out (int64 [B, Hq])
    backend     the backend that ran; reason says why it was chosen; quantization is what it used
    error       with config.max_error: the estimated relative L1 of each head's result (float32 [B, Hq])
    redone      with config.max_error: heads that were over it and were computed anew (bool [B, Hq])
    """

    executed: Tensor
    visible: Tensor
    skipped_pv: Tensor
    backend: str
    reason: str
    quantization: str
    error: Tensor | None = None
    redone: Tensor | None = None

    @property
    def sparsity(self) -> Tensor:
        return _skipped_share(self.executed.sum(), self.visible.sum())

    @property
    def sparsity_per_head(self) -> Tensor:
        return _skipped_share(self.executed, self.visible)


def _skipped_share(executed: Tensor, visible: Tensor) -> Tensor:
    """Where nothing is visible, nothing is skipped."""
    return (visible - executed).float() / visible.clamp(min=1)
