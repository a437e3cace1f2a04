"""A case made concrete: its tensors, its mask, and the backend of ours that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparge.backends import BACKENDS, Backend
from sparge.bench.captured import Captured
from sparge.bench.cases import Case
from sparge.bench.masks import random_mask
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs, prepare_inputs

NOT_KERNELS = ("dense", "reference")  # torch's own attention, and the oracle, which saves no time


class CannotRunError(Exception):
    """A case that this machine or these settings rule out; the message says why, in one phrase."""


@dataclass(frozen=True)
class Settings:
    """What all cases of a run have in common."""

    device: torch.device
    heads: int
    block: tuple[int, int] = SparseConfig().block
    backend: str | None = None  # None: the first of our kernels that can
    captured: Captured | None = None
    without: tuple[str, ...] = field(default=())  # contenders to leave out

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Problem:
    """`config` is the default predictor's, with the case's number formats; `mask` is the case's."""

    case: Case
    inputs: Inputs
    backend: Backend
    config: SparseConfig
    mask: BlockMask

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs.query, self.inputs.key, self.inputs.value


def make_problem(case: Case, settings: Settings) -> Problem:
    generator = torch.Generator(settings.device).manual_seed(0)
    query, key, value, case = _tensors(case, settings, generator)
    inputs = _inputs(query, key, value, case)
    config = SparseConfig(quantization=case.quantization, block=settings.block)
    backend = _own_backend(inputs, config, settings.backend)
    if config.quantization == "auto":
        config = replace(config, quantization=backend.default_quantization(settings.device))
    if case.mask == "real":
        mask = backend.select(backend.summarize(inputs, config), config)
    else:
        mask = random_mask(case, inputs.visibility, query.shape[1], settings.block, generator)
    skipped = float(mask.sparsity) if case.mask == "real" else case.sparsity
    return Problem(replace(case, quantization=config.quantization, sparsity=skipped), inputs, backend, config, mask)


def _inputs(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Inputs:
    return prepare_inputs(query, key, value, is_causal=case.causal, enable_gqa=case.group > 1, needs_lse=False)


def _tensors(case: Case, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Case]:
    """Q, K and V [1, heads, tokens, head_dim], and the case with the shape they have."""
    device, dtype, captured = settings.device, settings.dtype, settings.captured
    if case.mask == "real":
        if captured is None:
            raise CannotRunError("needs --captured FILE; `sparge capture FILE` makes one")
        _, tokens, head_dim = captured.query.shape
        case = replace(case, tokens=tokens, head_dim=head_dim, causal=captured.causal, group=captured.group)
        query, key, value = (x[None].to(device, dtype) for x in (captured.query, captured.key, captured.value))
        return query, key, value, case
    if settings.heads % case.group:
        raise CannotRunError(f"{settings.heads} heads do not divide into groups of {case.group}; see --heads")
    kv_heads = settings.heads // case.group

    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, case.tokens, case.head_dim, generator=generator, device=device, dtype=dtype)

    return normal(settings.heads), normal(kv_heads), normal(kv_heads), case


def _own_backend(inputs: Inputs, config: SparseConfig, name: str | None) -> Backend:
    refusals = []
    for backend in BACKENDS:
        if backend.name != name if name is not None else backend.name in NOT_KERNELS:
            continue
        refusal = backend.unavailable() or backend.unsupported(inputs, config)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
    raise CannotRunError("; ".join(refusals))
