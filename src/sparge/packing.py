"""Sequences packed end to end: where each begins, and what was computed of each. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparge.block_mask import BlockMask
from sparge.visibility import Visibility


@dataclass(frozen=True)
class Packing:
    """Sequence n holds tokens ends[n] to ends[n + 1]. Its blocks begin at ends[n] // size + n among all blocks."""

    q_ends: Tensor  # int32 or int64 [sequences + 1]
    k_ends: Tensor

    @property
    def count(self) -> int:
        return len(self.q_ends) - 1

    @property
    def signature(self) -> tuple[int, torch.dtype, torch.dtype, int, int]:
        """Number of sequences, types of the ends, and their addresses modulo 16."""
        q_ends, k_ends = self.q_ends, self.k_ends
        return self.count, q_ends.dtype, k_ends.dtype, q_ends.data_ptr() & 15, k_ends.data_ptr() & 15

    def blocks_per_sequence(self, mask: BlockMask, sight: Visibility) -> tuple[Tensor, Tensor]:
        """Kept and visible blocks, int64 [sequences, heads]."""
        rows, keys = mask.block
        slots = torch.arange(mask.bits.shape[2], device=mask.bits.device)
        starts, q_len, k_len = self.q_ends[:-1].long(), self.q_ends.diff().long(), self.k_ends.diff().long()
        bases = starts // rows + torch.arange(self.count, device=starts.device)
        owner = torch.searchsorted(bases, slots, right=True) - 1
        block = slots - bases[owner]
        offset = (k_len - q_len)[owner]
        top = block * rows
        bottom = torch.minimum(top + rows, q_len[owner])
        low = (top + offset - sight.left).clamp(min=0)
        high = torch.minimum(bottom + offset + sight.right, k_len[owner])
        real = (top < bottom) & (low < high)
        visible = torch.where(real, -(-high // keys) - low // keys, 0)
        kept = torch.where(real, mask.kept_per_row[0], 0)  # [heads, slots]
        heads = kept.shape[0]

        def per_sequence(counts: Tensor) -> Tensor:
            return counts.new_zeros(heads, self.count).index_add_(1, owner, counts.expand(heads, -1)).T

        return per_sequence(kept), per_sequence(visible)


def sequence_ends(name: str, ends: Tensor, tokens: int, longest_name: str, longest: int) -> list[int]:
    """The ends on the host, checked against the tokens there are."""
    values: list[int] = ends.tolist()
    lengths = [end - start for start, end in pairwise(values)]
    if values[0] != 0 or values[-1] != tokens or min(lengths) < 0:
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, not {values}.")
    if max(lengths) > longest:
        raise ValueError(f"{longest_name}={longest} is less than the longest sequence, {max(lengths)}.")
    return values
