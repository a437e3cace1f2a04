"""Launches the probe and the selection, some heads after the others; no host synchronisation anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sparge.backends.triton.arguments import Scratch, either, sequence_ends, setting
from sparge.backends.triton.dispatch import addresses_of
from sparge.backends.triton.plans import SelectedHeads, SelectPlan, select_plan
from sparge.block_mask import BlockMask
from sparge.config import RULES, SparseConfig
from sparge.probing import SHARE_DTYPE
from sparge.stages import Blocks
from sparge.words import WORD

# Fills the shares of some heads in place of the portable kernel; says whether it did.
OwnProbe = Callable[[Blocks, SparseConfig, SelectPlan, SelectedHeads, Tensor], bool]
# Fills the bits of some heads, given their shares, likewise.
OwnSelect = Callable[[Blocks, SparseConfig, SelectPlan, SelectedHeads, Tensor, Tensor], bool]


def select_by_parts(
    blocks: Blocks,
    config: SparseConfig,
    chip: int,
    own_probe: OwnProbe | None = None,
    own_select: OwnSelect | None = None,
) -> BlockMask:
    inputs, sight, q = blocks.inputs, blocks.inputs.visibility, blocks.inputs.query
    if config.keeps_everything and inputs.packing is None:
        return BlockMask.all_visible(sight, config.block, *q.shape[:2])
    plan = select_plan(inputs.signature, config, chip)
    size = plan.sizes
    bits = q.new_empty(size.entries, size.heads, size.q_slots, plan.words, dtype=torch.int32)
    for part in plan.parts:
        shares = shares_of(blocks, config, plan, part, own_probe)
        blocks.finish()  # what the probe did not take along: selection asks which values are finite
        if own_select is None or not own_select(blocks, config, plan, part, shares, bits):
            _select(blocks, config, plan, part, shares, bits)
    q_len = sight.q_len if inputs.packing is None else size.q_slots * config.block[0]
    return BlockMask(bits, q_len, sight.k_len, config.block, sight)


def _select(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, shares: Tensor, bits: Tensor
) -> None:
    """By the portable kernel."""
    inputs, sight, q = blocks.inputs, blocks.inputs.visibility, blocks.inputs.query
    filled = q
    stored = (q, q)
    if plan.stored is not None:
        scratch = Scratch(q, plan.stored)
        stored = (scratch.piece("weights"), scratch.piece("shifts"))
    if sight.key_valid is not None:
        filled = blocks.k_filled.contiguous().view(torch.int8)
    tensors = (
        blocks.q_means, blocks.k_means, filled, either(sight.valid_before, q), either(sight.unbroken, q),
        *sequence_ends(inputs), blocks.v_finite.view(torch.int8),
        either(blocks.q_similarity, q), either(blocks.k_similarity, q),
        *(_protected(config, sight.q_len, sight.k_len, q.device) if config.protected else (q, q)),
        *(setting(config, name, inputs, name in config.rule) for name in RULES),
        setting(config, "similarity", inputs, config.similarity is not None), *stored, shares, bits,
    )  # fmt: skip
    part.select(tensors, addresses_of(tensors))


def shares_of(
    blocks: Blocks, config: SparseConfig, plan: SelectPlan, part: SelectedHeads, own_probe: OwnProbe | None = None
) -> Tensor:
    """What sampled rows attend to, of some heads; a ring knows it already."""
    inputs, sight, q = blocks.inputs, blocks.inputs.visibility, blocks.inputs.query
    if part.probe is None:
        return q
    width = plan.words * WORD
    if blocks.probed is not None:
        known = blocks.probed.flatten(0, 1)[part.first : part.stop]
        return torch.nn.functional.pad(known, (0, width - known.shape[2])).contiguous()
    shares = q.new_empty(part.stop - part.first, plan.share_rows, width, dtype=SHARE_DTYPE)
    if own_probe is not None and own_probe(blocks, config, plan, part, shares):
        return shares
    logs = q.new_empty(plan.logs, dtype=torch.float32)
    valid = q if sight.key_valid is None else sight.key_valid.contiguous().view(torch.int8)
    operands, copies = (q, inputs.key, q, q), blocks.quantized
    if copies is not None:
        operands = (copies.query, copies.key, copies.query_scale, copies.key_scale)
    tensors = (*operands, valid, either(sight.unbroken, q), *sequence_ends(inputs), logs, shares)
    part.probe(tensors, addresses_of(tensors))
    return shares


@functools.lru_cache(maxsize=64)
def _protected(config: SparseConfig, q_len: int, k_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int8 flags of the query and key blocks that hold protected tokens."""
    rows, keys = config.block
    q_flags, k_flags = (
        torch.zeros(-(-n // size), dtype=torch.int8, device="cpu") for n, size in ((q_len, rows), (k_len, keys))
    )
    for start, stop in config.protected_ranges(k_len):
        if start < stop:
            k_flags[start // keys : -(-stop // keys)] = 1
        top, bottom = max(0, start - (k_len - q_len)), min(q_len, stop - (k_len - q_len))
        if top < bottom:
            q_flags[top // rows : -(-bottom // rows)] = 1
    return q_flags.to(device), k_flags.to(device)
