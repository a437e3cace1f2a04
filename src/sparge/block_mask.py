"""BlockMask: which blocks of the attention matrix are computed, one bit each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparge.config import BLOCK_KEYS, BLOCK_ROWS
from sparge.visibility import Visibility
from sparge.words import WORD, count_per_row, pack, packed_spans, unpack

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

SHADES = " ░▒▓█"


class BlockLists(NamedTuple):
    """Kept key blocks of each query block, ascending; entries past the count are -1."""

    counts: Tensor  # int32 [B, H, query blocks]
    indices: Tensor  # int32 [B, H, query blocks, key blocks]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block mask of `block` = (rows, keys) over a q_len x k_len attention matrix, per batch entry and query head.

    The batch and head extents may be 1, to serve every batch entry or head. `visible` says which blocks the caller's
    causal order, window and padding leave visible, as bits or as the Visibility they follow from; sparsity counts
    among those, or among all without it.

    >>> mask = BlockMask.from_dense(torch.eye(4, 8).bool(), q_len=512, k_len=512)
    >>> mask
    BlockMask(batch=1, heads=1, 4 x 8 blocks of 128 x 64, sparsity 87.5%)
    >>> round(mask.sparsity.item(), 3)
    0.875
    """

    bits: Tensor  # int32 [B, H, query blocks, ceil(key blocks / 32)]; key block j is bit j % 32 of word j // 32
    q_len: int
    k_len: int
    block: tuple[int, int]
    visible: Tensor | Visibility | None = None

    def __post_init__(self) -> None:
        _check_block(self.block)
        if not isinstance(self.bits, Tensor):
            raise TypeError(f"bits must be an int32 tensor, not {type(self.bits).__name__}; see BlockMask.from_dense.")
        if self.q_len < 1 or self.k_len < 1:
            raise ValueError(f"q_len and k_len must be at least 1, not {self.q_len} and {self.k_len}.")
        want = (self.q_blocks, -(-self.k_blocks // WORD))
        for name, bits in (("bits", self.bits), ("visible", self.visible)):
            if isinstance(bits, Tensor) and (
                bits.dtype != torch.int32 or bits.dim() != 4 or tuple(bits.shape[2:]) != want
            ):
                raise ValueError(
                    f"{name} must be int32 [B, H, {want[0]}, {want[1]}] for {self.q_len} x {self.k_len} tokens in "
                    f"{self.block[0]} x {self.block[1]} blocks, not {bits.dtype} {tuple(bits.shape)}."
                )

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block[0])

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block[1])

    @property
    def visible_bits(self) -> Tensor | None:
        """The visible blocks, packed as `bits`; None: all."""
        if isinstance(self.visible, Visibility):
            return _visible_words(self.visible, self.block)
        return self.visible

    # ---- from and to other forms

    @classmethod
    def all_visible(cls, visibility: Visibility, block: tuple[int, int], batch: int, heads: int) -> BlockMask:
        """Every block that holds a visible pair; stored once for all heads."""
        bits = _visible_words(visibility, block).expand(batch, heads, -1, -1)
        return cls(bits, visibility.q_len, visibility.k_len, block, visibility)

    def cut_to(self, sight: Visibility, batch: int) -> BlockMask:
        """The blocks of the mask that hold a visible pair, for a batch that may share it."""
        visible = self.all_visible(sight, self.block, batch, self.bits.shape[1])
        bits = self.bits & visible.bits if sight.key_valid is not None else self.bits & visible.bits[:1]
        return BlockMask(bits, self.q_len, self.k_len, self.block, sight)

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        q_len: int,
        k_len: int,
        block: tuple[int, int] = (128, 64),
        visible: Tensor | Visibility | None = None,
    ) -> BlockMask:
        """From booleans [query blocks, key blocks], with up to two leading extents (batch, heads)."""
        _check_block(block)
        if not isinstance(dense, Tensor):
            raise TypeError(f"dense must be a bool tensor, not {type(dense).__name__}.")
        want = (-(-q_len // block[0]), -(-k_len // block[1]))
        for name, x in (("dense", dense), ("visible", visible)):
            if isinstance(x, Tensor) and (
                x.dtype != torch.bool or x.dim() not in (2, 3, 4) or tuple(x.shape[-2:]) != want
            ):
                raise ValueError(
                    f"{name} must be a bool tensor ending in [{want[0]}, {want[1]}] blocks for {q_len} x {k_len} "
                    f"tokens in {block[0]} x {block[1]} blocks, not {x.dtype} {tuple(x.shape)}."
                )
        return cls(pack(dense), q_len, k_len, block, pack(visible) if isinstance(visible, Tensor) else visible)

    @classmethod
    def from_lists(
        cls, counts: Tensor, indices: Tensor, q_len: int, k_len: int, block: tuple[int, int] = (128, 64)
    ) -> BlockMask:
        """From kept key blocks: the first counts[...] entries of indices[..., :] are kept; the rest is not read."""
        _check_block(block)
        for name, x in (("counts", counts), ("indices", indices)):
            if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
                raise TypeError(
                    f"{name} must be an int32 or int64 tensor, not {getattr(x, 'dtype', type(x).__name__)}."
                )
        if indices.shape[-1] < 1 or indices.shape[:-1] != counts.shape:
            raise ValueError(
                f"indices must be counts' shape {tuple(counts.shape)} and one list each, not {tuple(indices.shape)}."
            )
        k_blocks = -(-k_len // block[1])
        if (counts < 0).any() or (counts > indices.shape[-1]).any():
            low, high = int(counts.min()), int(counts.max())
            raise ValueError(f"counts must lie from 0 to the lists' {indices.shape[-1]} entries, not {low} to {high}.")
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        spare = torch.where(listed, indices.long(), k_blocks)
        if spare.min() < 0 or (spare > k_blocks).any() or (listed & (indices >= k_blocks)).any():
            raise ValueError(f"indices must name key blocks 0 to {k_blocks - 1}.")
        dense = torch.zeros(*indices.shape[:-1], k_blocks + 1, dtype=torch.bool, device=indices.device)
        return cls.from_dense(dense.scatter_(-1, spare, True)[..., :-1], q_len, k_len, block)

    @classmethod
    def from_flex(cls, flex: FlexBlockMask) -> BlockMask:
        """The blocks of a FlexAttention mask, partial and full.

        What its mask_mod hides inside partial blocks is not known here: say it with is_causal, window or attn_mask.
        """
        q_len, k_len = flex.seq_lengths
        rows, keys = flex.BLOCK_SIZE
        mask = cls.from_lists(flex.kv_num_blocks, flex.kv_indices, q_len, k_len, (rows, keys))
        if flex.full_kv_num_blocks is not None and flex.full_kv_indices is not None:
            mask |= cls.from_lists(flex.full_kv_num_blocks, flex.full_kv_indices, q_len, k_len, (rows, keys))
        return mask

    def to_flex(self, mask_mod: object = None) -> FlexBlockMask:
        """As FlexAttention's BlockMask. With a mask_mod, kept blocks are also masked inside by it."""
        from torch.nn.attention.flex_attention import BlockMask as Flex

        counts, indices = self.to_lists()
        indices = indices.clamp(min=0)
        lengths = (self.q_len, self.k_len)
        if mask_mod is not None:
            return Flex.from_kv_blocks(counts, indices, None, None, self.block, mask_mod, lengths)  # type: ignore[arg-type]
        dense, (rows, keys) = self.to_dense(), self.block
        last_batch, last_head = dense.shape[0] - 1, dense.shape[1] - 1

        def kept(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            # Eager FlexAttention reads nothing but the mask_mod; compiled, full blocks skip it.
            return dense[b.clamp(max=last_batch), h.clamp(max=last_head), q // rows, kv // keys]

        none = torch.zeros_like(counts)
        return Flex.from_kv_blocks(none, indices, counts, indices, self.block, kept, lengths)

    def to_dense(self) -> Tensor:
        """bool [B, H, query blocks, key blocks]."""
        return unpack(self.bits, self.k_blocks)

    def to_lists(self) -> BlockLists:
        dense = self.to_dense()
        counts = dense.sum(-1, dtype=torch.int32)
        order = dense.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        listed = torch.arange(self.k_blocks, device=dense.device) < counts[..., None]
        return BlockLists(counts, torch.where(listed, order, -1))

    # ---- parts

    def of_keys(self, first: int, last: int, sight: Visibility) -> BlockMask:
        """Key blocks first ... last as the mask of those keys alone; `sight` is theirs. No bit is unpacked."""
        (word, shift), count = divmod(first, WORD), last - first
        words = -(-count // WORD)
        missing = max(0, word + words + 1 - self.bits.shape[-1])
        bits = torch.nn.functional.pad(self.bits[..., word : word + words + 1], (0, missing))
        if shift:
            low = (bits[..., :-1] >> shift) & ((1 << (WORD - shift)) - 1)  # the sign bit must not spread
            bits = low | (bits[..., 1:] << (WORD - shift))
        else:
            bits = bits[..., :-1].clone()
        if count % WORD:
            bits[..., -1] &= (1 << count % WORD) - 1
        return BlockMask(bits, self.q_len, sight.k_len, self.block, sight)

    @property
    def kept_columns(self) -> Tensor:
        """bool [key blocks]: kept for some row of some head of some batch entry."""
        rows = self.bits.reshape(-1, self.bits.shape[-1])
        while len(rows) > 1:  # halves at a time, so that no bit is unpacked before one row is left
            half = -(-len(rows) // 2)
            rows = torch.cat((rows[: len(rows) - half] | rows[half:], rows[len(rows) - half : half]))
        return unpack(rows[0], self.k_blocks)

    # ---- measures

    @property
    def kept_per_row(self) -> Tensor:
        """Kept blocks of each query block, int64 [B, H, query blocks]."""
        return count_per_row(self.bits)

    @property
    def kept_per_head(self) -> Tensor:
        """Kept (and, where known, visible) blocks, int64 [B, H]."""
        return count_per_row(self.bits, self.visible_bits).sum(-1)

    @property
    def visible_per_head(self) -> Tensor:
        """Visible blocks, int64 [B, H]."""
        if isinstance(self.visible, Visibility):
            counts = self.visible.visible_per_row(*self.block).sum(-1, keepdim=True)  # the same for every head
        elif self.visible is not None:
            counts = count_per_row(self.visible).sum(-1)
        else:
            counts = torch.full((1, 1), self.q_blocks * self.k_blocks, device=self.bits.device)
        return counts.expand(torch.broadcast_shapes(self.bits.shape[:2], counts.shape))

    @property
    def sparsity(self) -> Tensor:
        """Share of visible blocks that are skipped, a 0-d float32 tensor."""
        kept, visible = self.kept_per_head.sum(), self.visible_per_head.sum()
        return (visible - kept).float() / visible.clamp(min=1)

    # ---- sets

    def __or__(self, other: BlockMask) -> BlockMask:
        self._check_same_shape(other)
        return self._combined(self.bits | other.bits, other)

    def __and__(self, other: BlockMask) -> BlockMask:
        self._check_same_shape(other)
        return self._combined(self.bits & other.bits, other)

    def _check_same_shape(self, other: BlockMask) -> None:
        if not isinstance(other, BlockMask):
            raise TypeError(f"a BlockMask combines with a BlockMask, not with {type(other).__name__}.")
        extents = zip(self.bits.shape[:2], other.bits.shape[:2], strict=True)
        if any(a != b and 1 not in (a, b) for a, b in extents) or self.bits.device != other.bits.device:
            raise ValueError(f"masks of other batch, heads or device cannot be combined: {self!r} and {other!r}.")
        if (self.q_len, self.k_len, self.block) != (other.q_len, other.k_len, other.block):
            raise ValueError(f"masks of different shape cannot be combined: {self!r} and {other!r}.")

    def _combined(self, bits: Tensor, other: BlockMask) -> BlockMask:
        visible: Tensor | Visibility | None = self.visible
        if self.visible is not other.visible:
            mine, theirs = self.visible_bits, other.visible_bits
            visible = None if mine is None or theirs is None else mine | theirs
        return BlockMask(bits, self.q_len, self.k_len, self.block, visible)

    def equals(self, other: BlockMask) -> bool:
        """Whether both keep exactly the same blocks (waits for the device)."""
        if not isinstance(other, BlockMask):
            return False
        same_shape = (self.q_len, self.k_len, self.block) == (other.q_len, other.k_len, other.block)
        return same_shape and self.bits.shape == other.bits.shape and bool((self.bits == other.bits).all())

    # ---- to look at

    def __repr__(self) -> str:
        batch, heads = self.bits.shape[:2]
        size = f"{self.q_blocks} x {self.k_blocks} blocks of {self.block[0]} x {self.block[1]}"
        return f"BlockMask(batch={batch}, heads={heads}, {size}, sparsity {self.sparsity.item():.1%})"

    def picture(self, batch: int = 0, head: int = 0, width: int = 64) -> str:
        """The mask as text, one character per block or per patch of blocks: darker is fuller.

        >>> print(BlockMask.from_dense(torch.ones(2, 4).bool().tril(1), q_len=256, k_len=256).picture())
        ██··
        ███·
        """

        def shown(bits: Tensor) -> Tensor:
            one = bits[min(batch, bits.shape[0] - 1), min(head, bits.shape[1] - 1)]
            return unpack(one, self.k_blocks).float().cpu()

        dense, visible = shown(self.bits), self.visible_bits
        seen = torch.ones_like(dense) if visible is None else shown(visible)
        columns = min(width, self.k_blocks)
        rows = min(-(-columns // 2), self.q_blocks) if self.k_blocks > width else self.q_blocks
        size = (rows, columns)
        fill = torch.nn.functional.adaptive_avg_pool2d((dense * seen)[None], size)[0]
        lit = torch.nn.functional.adaptive_avg_pool2d(seen[None], size)[0]
        share = torch.where(lit > 0, fill / lit.clamp(min=1e-6), -1.0)
        return "\n".join("".join(_shade(value) for value in line).rstrip() for line in share.tolist())


def _check_block(block: tuple[int, int]) -> None:
    good = isinstance(block, tuple) and len(block) == 2 and block[0] in BLOCK_ROWS and block[1] in BLOCK_KEYS
    if not good:
        raise ValueError(
            f"block must be (rows, keys) with rows in {BLOCK_ROWS} and keys in {BLOCK_KEYS}, not {block!r}."
        )


def _shade(share: float) -> str:
    """Blank: not visible; a dot: visible and skipped; then by how much is kept."""
    if share < 0:
        return " "
    if share == 0:
        return "·"
    return SHADES[min(len(SHADES) - 1, 1 + int(share * (len(SHADES) - 1.001)))]


def _visible_words(sight: Visibility, block: tuple[int, int]) -> Tensor:
    """int32 [B or 1, 1, query blocks, words]: every block that holds a visible pair."""
    k_blocks = -(-sight.k_len // block[1])
    words, filled = packed_spans(*sight.block_spans(*block), k_blocks), sight.filled(block[1])
    return words if filled is None else words & pack(filled[:, None, None])
