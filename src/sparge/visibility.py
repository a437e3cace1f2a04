"""Which keys a query row may see: sequence ends, causal order, sliding window, key padding."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

UNBOUNDED = 1 << 40  # further than any sequence reaches, and far from overflow


@dataclass(frozen=True)
class Visibility:
    """Row r stands at key position r + k_len - q_len (bottom-right) and sees `left` keys before it, `right` after."""

    q_len: int
    k_len: int
    device: torch.device
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    key_valid: Tensor | None = None  # bool [B, Nk]; None: every key is valid

    @property
    def offset(self) -> int:
        return self.k_len - self.q_len

    @functools.cached_property
    def valid_before(self) -> Tensor | None:
        """int32 [B, Nk + 1]: how many valid keys stand before each position; None: every key is valid."""
        if self.key_valid is None:
            return None
        return torch.nn.functional.pad(self.key_valid.cumsum(1, dtype=torch.int32), (1, 0))

    @functools.cached_property
    def unbroken(self) -> Tensor | None:
        """int32 [B]: how many valid keys stand before the first that is not; None: every key is valid."""
        if self.valid_before is None:
            return None
        position = torch.arange(1, self.k_len + 1, dtype=torch.int32, device=self.device)
        return (self.valid_before[:, 1:] == position).sum(1, dtype=torch.int32)

    @property
    def causal(self) -> bool:
        """Whether rows see no key after their own position, and all of them stand at one."""
        return self.right == 0 and self.q_len <= self.k_len

    @property
    def windowed(self) -> bool:
        """Whether keys are hidden that causal order and padding would show."""
        return self.left < self.k_len or (self.right < self.k_len and not self.causal)

    def same_as(self, other: object) -> bool:
        """Whether both let every row see the same keys, as far as can be told without a look at the padding."""
        return self is other or (
            isinstance(other, Visibility)
            and self.key_valid is other.key_valid
            and (self.q_len, self.k_len, self.left, self.right, self.device)
            == (other.q_len, other.k_len, other.left, other.right, other.device)
        )

    def part(self, rows: range, keys: range) -> Visibility:
        """The same sight for some rows and keys, each counted from the first of them."""
        shift = keys.start - rows.start - self.offset + len(keys) - len(rows)
        left = self.left if self.left >= UNBOUNDED else self.left + shift
        right = self.right if self.right >= UNBOUNDED else self.right - shift
        valid = None if self.key_valid is None else self.key_valid[:, keys.start : keys.stop]
        return Visibility(len(rows), len(keys), self.device, left, right, valid)

    def keys_seen_from(self, top: int, bottom: int) -> int:
        """How many keys, from the first on, all rows from `top` to `bottom` are known to see."""
        if self.key_valid is not None or bottom + self.offset - self.left > 0:
            return 0
        return max(0, min(self.k_len, top + self.offset + self.right + 1))

    def pairs(self, rows: range | Tensor, keys: range) -> Tensor:
        """bool [B or 1, 1, rows, keys]: which row sees which key."""
        if isinstance(rows, range):
            rows = torch.arange(rows.start, rows.stop, device=self.device)
        position = rows[:, None] + self.offset
        key = torch.arange(keys.start, keys.stop, device=self.device)
        seen = (key <= position + self.right)[None, None]
        if self.left < UNBOUNDED:
            seen &= key >= position - self.left
        if self.key_valid is not None:
            seen = seen & self.key_valid[:, None, None, keys.start : keys.stop]
        return seen

    def blocks(self, rows: int, keys: int, first: int = 0, last: int | None = None) -> Tensor:
        """bool [B or 1, 1, row blocks, key blocks]: where a block of `rows` x `keys` has a visible pair.

        `first` and `last` choose a range of row blocks.
        """
        begin, end = self.block_spans(rows, keys, first, last)
        block = torch.arange(-(-self.k_len // keys), device=self.device)
        seen = (block >= begin[..., None]) & (block < end[..., None])
        filled = self.filled(keys)
        return (seen if filled is None else seen & filled[:, None])[:, None]

    def visible_per_row(self, rows: int, keys: int) -> Tensor:
        """int64 [B or 1, row blocks]: how many key blocks `blocks` has in each."""
        begin, end = self.block_spans(rows, keys)
        filled = self.filled(keys)
        if filled is None:
            return end - begin
        before = torch.nn.functional.pad(filled.cumsum(1), (1, 0))
        return before.gather(1, end) - before.gather(1, begin)

    def block_spans(self, rows: int, keys: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """int64 [B or 1, row blocks], twice: between which key blocks those visible lie; equal where there are none.

        All between them are visible but for those without a valid key.
        """
        low, high = self._keys_of_row_blocks(rows, first, last)
        begin = low // keys
        return begin, torch.where(low < high, (high + (keys - 1)) // keys, begin)

    def filled(self, keys: int) -> Tensor | None:
        """bool [B, key blocks]: which hold a valid key; None: all."""
        if self.key_valid is None:
            return None
        padded: Tensor = torch.nn.functional.pad(self.key_valid, (0, -self.k_len % keys))
        filled: Tensor = padded.unflatten(1, (-1, keys)).any(-1)
        return filled

    def _keys_of_row_blocks(self, rows: int, first: int, last: int | None) -> tuple[Tensor, Tensor]:
        """[B or 1, row blocks], twice: from the first key that some row of the block sees to behind the last."""
        count = -(-self.q_len // rows)
        count = count if last is None else min(last, count)
        top = torch.arange(first * rows, count * rows, rows, device=self.device)
        low = (top + (self.offset - self.left)).clamp_(0, self.k_len)
        high = (top + rows).clamp_(max=self.q_len).add_(self.offset + self.right).clamp_(0, self.k_len)
        before = self.valid_before
        if before is None:
            return low[None], high[None]
        following = torch.searchsorted(before, before.index_select(1, low) + 1) - 1  # the next valid key
        return following, torch.searchsorted(before, before.index_select(1, high))  # behind the last valid one

    @property
    def right_bounded(self) -> bool:
        return self.right < UNBOUNDED

    def right_edge(self, rows: int, keys: int) -> Tensor:
        """bool [row blocks, key blocks]: blocks that hold the last key some row sees; under causal, the diagonal.

        They are always kept: what a row sees of them then never depends on what it cannot see.
        """
        last_key = Visibility(self.q_len, self.k_len, self.device, left=-self.right, right=self.right)
        return last_key.blocks(rows, keys)[0, 0]
