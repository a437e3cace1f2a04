"""One attention call under many settings: all heads at once, exact output computed once, error on sampled blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge.backends import choose
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.reference import GROUP, probe
from sparge.tuning.many_masks import outputs_under

EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")


@dataclass(frozen=True)
class Gradient:
    """By one call's output, at the sampled rows: [B, H, rows, Dv] each."""

    drawn: Tensor  # [draws, ...]: of drawn outcomes
    loss: Tensor | None  # of the mean loss, where what is to be predicted is known
    predictions: int = 1  # that this is the mean of

    @property
    def energy(self) -> Tensor:
        """Mean squares of gradients of outcomes, [B, H]; what came true is an outcome too."""
        if len(self.drawn) or self.loss is None:
            return self.drawn.double().square().mean((0, 3, 4))
        return self.loss.double().square().mean((2, 3)) * self.predictions


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
    loss: Tensor  # what the errors add to the loss, to first order; 0 where none is known

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(*(mine + theirs for mine, theirs in zip(self.parts(), other.parts(), strict=True)))

    def joined(self, other: Measurement) -> Measurement:
        """More candidates on the same calls."""
        mine, theirs = self.parts(), other.parts()
        return Measurement(*mine[:3], *(torch.cat(pair) for pair in zip(mine[3:], theirs[3:], strict=True)))

    def parts(self) -> tuple[Tensor, ...]:
        return (
            self.visible, self.absolute, self.squared,
            self.executed, self.products, self.absolute_error, self.squared_error, self.moved, self.expected, self.loss,
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
    gradient: Gradient | None = None,
) -> Measurement:
    """Candidates may differ in selection settings and pv_threshold only: they share one summary of Q, K and V.

    gradient  at the sampled rows
    """
    length, block_rows = inputs.query.shape[2], candidates[0].block[0]
    sampled = sample_blocks(-(-length // block_rows), share, seed)
    rows = _rows_of(sampled, block_rows, length).to(exact.device)
    choice = choose(inputs, candidates[0], own_mask=True)  # masks are cut to the sampled rows
    blocks = choice.backend.summarize(inputs, choice.config)
    if "probe" in choice.config.rule:
        blocks = replace(blocks, probed=probe(blocks, choice.config))  # once for all candidates
    candidates = [replace(candidate, quantization=choice.config.quantization) for candidate in candidates]
    masks = [choice.backend.select(blocks, candidate) for candidate in candidates]
    some = [_only(mask, sampled) for mask in masks]
    found = Errors(len(candidates), inputs, gradient)
    if all(candidate.quantization == "none" and candidate.pv_threshold is None for candidate in candidates):
        for heads, those, dense, outputs in outputs_under(inputs, some, sampled.tolist()):
            found.add(heads, those, dense, outputs)
    else:
        want = exact.index_select(2, rows)
        for n, (mask, candidate) in enumerate(zip(some, candidates, strict=True)):
            output = choice.backend.attend(blocks, mask, candidate)
            found.add_candidate(n, want, output.values.index_select(2, rows), output.skipped_pv)
    groups = masks[0].block[0] // GROUP
    executed = torch.stack([_per_head(mask.kept_per_head, inputs) for mask in masks])
    products = torch.stack([_per_head(mask.kept_per_head * groups, inputs) for mask in some]) - found.skipped.cpu()
    return found.summed_up(_per_head(masks[0].visible_per_head, inputs), executed, products, length / len(rows))


class Errors:
    """Of each candidate's output against the exact one, added up piece by piece."""

    def __init__(self, candidates: int, inputs: Inputs, gradient: Gradient | None) -> None:
        batch, heads = inputs.query.shape[:2]
        new = functools.partial(torch.zeros, dtype=torch.float64, device=inputs.query.device)
        self.gradient = gradient
        self.size, self.square = new(2, batch, heads)
        self.absolute, self.squared = new(2, candidates, batch, heads)
        self.skipped = new(candidates, heads)
        self.along = new(0 if gradient is None else len(gradient.drawn), candidates, batch, heads)
        self.loss = new(candidates, batch, heads)

    def add(self, heads: slice, rows: slice, exact: Tensor, outputs: Tensor) -> None:
        """Some heads and rows of all candidates: [B, H, R, Dv] and [candidates, B, H, R, Dv]."""
        self._add_exact(heads, exact)
        self._add_errors(slice(None), heads, rows, outputs - exact)

    def add_candidate(self, number: int, exact: Tensor, output: Tensor, skipped: Tensor) -> None:
        """All heads and rows of one candidate."""
        everything = slice(None)
        if number == 0:
            self._add_exact(everything, exact)
        self._add_errors(slice(number, number + 1), everything, everything, (output.double() - exact.double())[None])
        self.skipped[number] = skipped.expand(self.size.shape).sum(0)

    def _add_exact(self, heads: slice, exact: Tensor) -> None:
        self.size[:, heads] += exact.double().abs().sum((2, 3))
        self.square[:, heads] += exact.double().square().sum((2, 3))

    def _add_errors(self, which: slice, heads: slice, rows: slice, error: Tensor) -> None:
        self.absolute[which, :, heads] += error.abs().sum((3, 4))
        self.squared[which, :, heads] += error.square().sum((3, 4))
        if self.gradient is None:
            return
        error = error.float()
        drawn = self.gradient.drawn[:, :, heads, rows].float()
        self.along[:, which, :, heads] += torch.einsum("sbhrd,cbhrd->scbh", drawn, error)
        if self.gradient.loss is not None:
            loss = self.gradient.loss[:, heads, rows].float()
            self.loss[which, :, heads] += torch.einsum("bhrd,cbhrd->cbh", loss, error)

    def summed_up(self, visible: Tensor, executed: Tensor, products: Tensor, scale: float) -> Measurement:
        """`scale`: all rows by those measured."""
        moved = expected = torch.zeros_like(self.absolute)
        if self.gradient is not None:
            # Few gradients say with much chance what errors do, but how long they are they say well.
            expected = self.gradient.energy * self.squared / 2
            moved = self.along.square().sum(0) / (2 * max(1, len(self.along)))
        by_candidate = (self.absolute, self.squared, moved * scale, expected * scale, self.loss * scale)
        return Measurement(
            visible, self.size.sum(0).cpu(), self.square.sum(0).cpu(), executed, products,
            *(x.sum(1).cpu() for x in by_candidate),
        )  # fmt: skip


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
