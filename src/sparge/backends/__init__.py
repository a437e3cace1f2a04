"""The backends, best first, and the choice among them. A refusal is data: one phrase that says why."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparge import reference
from sparge.backends.cpu.launch import CpuBackend
from sparge.backends.dense import DenseBackend
from sparge.backends.gather import GatherBackend
from sparge.backends.hopper.launch import HopperBackend
from sparge.backends.triton.launch import TritonBackend
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.judging import Verdict
from sparge.redoing import BudgetInTorch
from sparge.stages import Blocks, Output, Redo


class Backend(Protocol):
    """One way to run the pipeline. Each stage has a torch twin of the same signature in `reference`."""

    name: str
    takes_masks: bool  # whether attend follows any mask, not only that of its own select
    merit: str  # why it was chosen, where no better one refused

    def unavailable(self) -> str | None:
        """Why this machine cannot run it, or None."""

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        """Why it cannot run this call, or None."""

    def default_quantization(self, device: torch.device) -> str:
        """What quantization="auto" means here."""

    def summarize(self, inputs: Inputs, config: SparseConfig) -> Blocks: ...

    def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask: ...

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output: ...

    def exact_rows(self, inputs: Inputs, rows: Tensor) -> Tensor:
        """Dense attention of rows [R], unquantised: [B, Hq, R, Dv] in the inputs' dtype."""

    def judge(self, values: Tensor, exact: Tensor, rows: Tensor, max_error: float) -> Verdict:
        """Which heads may be further off than max_error, by rows [R] of [B, Hq, Nq, Dv] as they should be."""

    def attend_again(self, blocks: Blocks, config: SparseConfig, redo: Redo) -> None:
        """Attention over all visible blocks of some heads, in their place."""


class ReferenceBackend(BudgetInTorch):
    """The oracle: every mode on every device, at the cost of dense attention or more."""

    name = "reference"
    takes_masks = True
    merit = "first choice"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        return "takes packed sequences one at a time" if inputs.packing is not None else None

    def default_quantization(self, device: torch.device) -> str:
        return "none"

    summarize = staticmethod(reference.summarize)
    select = staticmethod(reference.select)
    attend = staticmethod(reference.attend)


# Best first. The dense one stands before the sparse kernels because it takes only what they cannot speed up.
BACKENDS: tuple[Backend, ...] = (
    DenseBackend(),
    HopperBackend(),
    TritonBackend(),
    CpuBackend(),
    GatherBackend(),
    ReferenceBackend(),
)


@dataclass(frozen=True)
class Choice:
    """The backend that will run, the config with "auto" resolved, and why."""

    backend: Backend
    config: SparseConfig
    reason: str


def takes_packed(inputs: Inputs, config: SparseConfig) -> bool:
    """Whether a backend computes packed sequences together."""
    return any(backend.unavailable() is None and backend.unsupported(inputs, config) is None for backend in BACKENDS)


@functools.lru_cache(maxsize=256)
def _in_format(config: SparseConfig, quantization: str) -> SparseConfig:
    """A config is checked whenever it is made; calls in a row need that once."""
    return replace(config, quantization=quantization)


def choose(inputs: Inputs, config: SparseConfig, own_mask: bool = False) -> Choice:
    """The first backend that can run this call; the reason names those passed over. `own_mask`: the caller's."""
    config.check_heads(inputs.query.shape[1])
    refusals: list[str] = []
    for backend in BACKENDS:
        refusal = backend.unavailable() or backend.unsupported(inputs, config)
        if own_mask and not backend.takes_masks:
            refusal = "the call brings its own mask"
        if refusal is None:
            if config.quantization == "auto":
                config = _in_format(config, backend.default_quantization(inputs.query.device))
            return Choice(backend, config, "; ".join(refusals) or backend.merit)
        refusals.append(f"{backend.name}: {refusal}")
    raise RuntimeError("No backend can run this call: " + "; ".join(refusals) + ".")
