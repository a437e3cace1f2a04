"""One attention call under many settings: all heads at once, exact output computed once, error on sampled blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.backends import choose
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.reference import GROUP, probe

EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")


@dataclass(frozen=True)
class Measurement:
    """Sums over one or more calls of a layer, float64: [heads], or [candidates, heads]."""

    visible: Tensor  # blocks
    absolute: Tensor  # of the exact output, over the sampled rows
    squared: Tensor
    executed: Tensor  # blocks, by candidate
    products: Tensor  # P V products of 64 rows and a key block, over the sampled rows, by candidate
    absolute_error: Tensor
    squared_error: Tensor
    moved: Tensor  # the divergence of the output along gradients, by candidate; 0 without any
    expected: Tensor  # the same of errors that have no direction

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(*(mine + theirs for mine, theirs in zip(self.parts(), other.parts(), strict=True)))

    def joined(self, other: Measurement) -> Measurement:
        """More candidates on the same calls."""
        mine, theirs = self.parts(), other.parts()
        return Measurement(*mine[:3], *(torch.cat(pair) for pair in zip(mine[3:], theirs[3:], strict=True)))

    def parts(self) -> tuple[Tensor, ...]:
        return (
            self.visible, self.absolute, self.squared,
            self.executed, self.products, self.absolute_error, self.squared_error, self.moved, self.expected,
        )  # fmt: skip

    @property
    def relative_l1(self) -> Tensor:
        return self.absolute_error / self.absolute.clamp(min=torch.finfo(torch.float64).tiny)


def exact_output(inputs: Inputs) -> Tensor:
    """Attention with everything kept, unquantised."""
    return sparse_output(inputs, EXACT)[0]


def sparse_output(inputs: Inputs, config: SparseConfig) -> tuple[Tensor, BlockMask]:
    """Attention, and the blocks that it kept; however short a call is, it is not left to dense attention."""
    choice = choose(inputs, config, own_mask=True)
    backend, config = choice.backend, choice.config
    blocks = backend.summarize(inputs, config)
    mask = backend.select(blocks, config)
    return backend.attend(blocks, mask, config).values, mask


def measure(
    inputs: Inputs,
    exact: Tensor,
    candidates: Sequence[SparseConfig],
    share: float,
    seed: int,
    gradient: Tensor | None = None,
) -> Measurement:
    """Candidates may differ in selection settings and pv_threshold only: they share one summary of Q, K and V.

    gradient  [draws, B, H, rows, Dv], of outcomes by the exact output, at the sampled rows
    """
    length, block_rows = inputs.query.shape[2], candidates[0].block[0]
    sampled = sample_blocks(-(-length // block_rows), share, seed)
    rows = _rows_of(sampled, block_rows, length).to(exact.device)
    want = exact.index_select(2, rows).double()
    choice = choose(inputs, candidates[0], own_mask=True)  # the mask below is cut to the sampled rows
    backend = choice.backend
    blocks = backend.summarize(inputs, choice.config)
    if "probe" in choice.config.rule:
        blocks = replace(blocks, probed=probe(inputs, choice.config))  # once for all candidates
    divergences = _divergences_along(gradient)
    counted = []
    for candidate in candidates:
        config = replace(candidate, quantization=choice.config.quantization)
        mask = backend.select(blocks, config)
        some = _only(mask, sampled)
        output = backend.attend(blocks, some, config)
        error = output.values.index_select(2, rows).double() - want
        products = some.kept_per_head * (mask.block[0] // GROUP) - output.skipped_pv
        squared = error.square().sum((2, 3))
        along = (x * (length / len(rows)) for x in divergences(error, squared))
        sums = (mask.kept_per_head, products, error.abs().sum((2, 3)), squared, *along)
        counted.append([_per_head(x, inputs) for x in sums])
        visible = mask.visible_per_head
    whole = (visible, want.abs().sum((2, 3)), want.square().sum((2, 3)))
    by_candidate = (torch.stack(column) for column in zip(*counted, strict=True))
    return Measurement(*(_per_head(x, inputs) for x in whole), *by_candidate)


def _divergences_along(gradient: Tensor | None) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(error, its square) -> float64 [B, H], twice: what the errors do to the output, and what any as large would.

    Half the mean square of the errors along each gradient. Few gradients say that with much chance, but how long they
    are they say well.
    """
    if gradient is None:
        return lambda _, squared: (torch.zeros_like(squared), torch.zeros_like(squared))
    directions, energy = gradient.float(), gradient.double().square().mean((0, 3, 4))

    def divergences(error: Tensor, squared: Tensor) -> tuple[Tensor, Tensor]:
        along = torch.einsum("sbhrd,bhrd->sbh", directions, error.float()).double()
        return along.square().mean(0) / 2, energy * squared / 2

    return divergences


def finer(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 tensors as float16 where all fit: the same numbers, and outputs whose rounding hides smaller errors."""
    if query.dtype != torch.bfloat16:
        return query, key, value
    halves = query.half(), key.half(), value.half()
    return halves if all(bool(x.isfinite().all()) for x in halves) else (query, key, value)


def measured_rows(length: int, block_rows: int, share: float, seed: int) -> Tensor:
    """The rows of the sampled blocks of a sequence."""
    return _rows_of(sample_blocks(-(-length // block_rows), share, seed), block_rows, length)


def sample_blocks(count: int, share: float, seed: int) -> Tensor:
    """Ascending query blocks, one at random from each of share * count equal stretches."""
    stretches = max(1, round(count * share))
    edges = torch.linspace(0, count, stretches + 1, dtype=torch.float64)
    chance = torch.rand(stretches, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    places = edges[:-1] + chance * (edges[1:] - edges[:-1])
    chosen: Tensor = places.long().clamp(max=count - 1).unique()
    return chosen


def _rows_of(blocks: Tensor, size: int, length: int) -> Tensor:
    rows = (blocks[:, None] * size + torch.arange(size)).flatten()
    return rows[rows < length]


def _only(mask: BlockMask, blocks: Tensor) -> BlockMask:
    """The mask with every other query block empty."""
    chosen = torch.zeros(mask.q_blocks, dtype=torch.int32)
    chosen[blocks] = -1  # all bits
    return replace(mask, bits=mask.bits & chosen.to(mask.bits.device)[:, None])


def _per_head(x: Tensor, inputs: Inputs) -> Tensor:
    """[B or 1, H or 1] summed over the batch, float64 [H] on the CPU."""
    return x.expand(inputs.query.shape[:2]).sum(0).double().cpu()
