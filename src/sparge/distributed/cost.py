"""A model of one attention call inside context_parallel: what each rank sends and computes.

Bytes are counted as the code counts them, for sequences that divide evenly into blocks and ranks. How much is needed
and executed depends on the data, and how long it takes on the machine: both are assumptions that you make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparge.distributed.agreement import MESSAGE_BYTES
from sparge.distributed.cargo import UNIT
from sparge.distributed.ring import sampled_tiles
from sparge.distributed.sharding import Shares, coalesced, split_evenly
from sparge.distributed.wire import (
    ALIGNMENT,
    FROM_HEADS,
    KEYS_AND_VALUES,
    NEEDS,
    PROBE,
    SAMPLE,
    SETTINGS,
    SUMMARIES,
    TO_HEADS,
)
from sparge.quantization import KEYS_PER_SCALE, MIN_ROTATION


@dataclass(frozen=True)
class Workload:
    """One call: its shape, its settings, and how sparse it turns out to be."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    batch: int = 1
    element_bytes: int = 2
    quantization: str = "int8-fp8"
    is_causal: bool = True  # cut in zigzag
    return_lse: bool = False
    block_rows: int = 128
    block_keys: int = 64
    sub_keys: int = 4
    probe_rows: int = 0  # of each query block; 0: without the rule "probe"
    needed: float = 1.0  # share of the other ranks' visible units that a rank needs
    executed: float = 1.0  # share of the visible blocks that are computed


@dataclass(frozen=True)
class Cost:
    """Of one rank, on average; `sent` by purpose, as in Traffic."""

    sent: dict[str, float]
    operations: float  # multiplications and additions of the executed blocks

    @property
    def ulysses_bytes(self) -> float:
        return self.sent[TO_HEADS] + self.sent[FROM_HEADS]

    @property
    def ring_bytes(self) -> float:
        return sum(self.sent.values()) - self.ulysses_bytes


def cost(work: Workload, ring: int, ulysses: int) -> Cost:
    """On a mesh of `ring` rows of `ulysses` ranks.

    >>> one = cost(Workload(1 << 20, heads=32, kv_heads=8), ring=8, ulysses=8)
    >>> f"{one.ring_bytes / 1e6:.0f} MB around the ring, {one.ulysses_bytes / 1e6:.0f} MB between heads"
    '192 MB around the ring, 294 MB between heads'
    """
    row_tokens, heads = work.tokens // ring, work.heads // ulysses
    key_heads = max(1, work.kv_heads // ulysses) * work.batch
    tokens, dim = row_tokens // ulysses, work.head_dim
    half = 0.5 if work.is_causal else 1.0

    own = work.batch * heads * tokens * dim * work.element_bytes
    other = key_heads * tokens * dim * work.element_bytes
    blocks = row_tokens // work.block_keys
    shares = split_evenly(work.tokens, ring, "zigzag" if work.is_causal else "contiguous")
    plan = sampled_tiles(shares)
    sampled = max(sum(length for _, _, length in of_rank) for of_rank in plan) * key_heads * dim * work.element_bytes
    sample = _message(sampled, sampled, key_heads * dim * 4) if work.quantization == "int8-fp8" else _message(sampled)
    # In zigzag, of two ranks' four chunks one is hidden from the other rank.
    seen = 0.75 if work.is_causal else 1.0
    sent = {
        SETTINGS: MESSAGE_BYTES * (ulysses - 1) + MESSAGE_BYTES * ulysses * (ring - 1),
        TO_HEADS: (ulysses - 1) * _message(own, other, other),
        FROM_HEADS: (ulysses - 1) * _message(own, work.batch * heads * tokens * 4 if work.return_lse else 0),
        SAMPLE: (ring - 1) * sample,
        SUMMARIES: (ring - 1) * _message(key_heads * blocks * work.sub_keys * dim * 2, key_heads * blocks),
        PROBE: (ring - 1) * _probe_message(work, work.batch * heads, shares),
        NEEDS: (ring - 1) * _message(work.tokens // UNIT),
        KEYS_AND_VALUES: (ring - 1) * seen * work.needed * key_heads * row_tokens * _bytes_per_key(work),
    }
    operations = 4.0 * work.batch * heads * row_tokens * work.tokens * dim * half * work.executed
    return Cost(sent, operations)


def _message(*tensors: float) -> float:
    """Bytes of tensors that travel together."""
    return sum(math.ceil(n / ALIGNMENT) * ALIGNMENT for n in tensors)


def _probe_message(work: Workload, heads: int, shares: Shares) -> float:
    """To another rank: own rows, their LSE over all keys, that of its rows over own keys, shares of own key blocks."""
    if not work.probe_rows:
        return 0.0
    blocks = work.tokens // work.block_rows // len(shares)
    rows, key_blocks = blocks * work.probe_rows, work.tokens // work.block_keys // len(shares)
    told = [blocks + len(coalesced(share)) for share in shares]  # and of what stands before each run of them
    found = sum(_message(heads * of_rank * key_blocks * 2) for of_rank in told) / len(shares)
    sampled = _message(heads * rows * work.head_dim * 2)
    if work.quantization != "none":
        sampled = _message(heads * rows * _rotated(work), heads * rows * 4)
    return sampled + 2 * _message(heads * rows * 4) + found


def _rotated(work: Workload) -> int:
    """Channels of int8 copies."""
    return max(MIN_ROTATION, 1 << (work.head_dim - 1).bit_length())


def _bytes_per_key(work: Workload) -> float:
    """Key, value, and what their scale comes to."""
    if work.quantization == "none":
        return 2 * work.head_dim * work.element_bytes
    value_bytes = 1 if work.quantization == "int8-fp8" else 2
    return _rotated(work) + work.head_dim * value_bytes + 4 / KEYS_PER_SCALE
