"""Before any data moves, the ranks compare what they were called with. One that cannot take its inputs says so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sparge.config import SparseConfig
from sparge.distributed.context import MOST_SEGMENTS, Parallel, current_parallel
from sparge.distributed.sharding import Shares, shares_of
from sparge.distributed.wire import SETTINGS
from sparge.inputs import Inputs

REFUSED = -1
MOST_NUMBERS = 32
MESSAGE_BYTES = 8 * MOST_NUMBERS


@dataclass(frozen=True)
class Field:
    """Something that must be the same on every rank. Digests are compared, but say nothing to a reader."""

    name: str
    number: int
    digest: bool = False


@dataclass(frozen=True)
class Division:
    """Who holds which query rows and keys of the whole problem."""

    rows: Shares
    keys: Shares


@contextmanager
def refusals_told() -> Iterator[None]:
    """In a context_parallel block, a rank that refuses its inputs tells the others, which would wait for it."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError):
        parallel = current_parallel()
        if parallel is not None:
            _gathered([REFUSED], parallel)
        raise


def agree(
    inputs: Inputs, config: SparseConfig, parallel: Parallel, return_stats: bool, ends: Sequence[list[int]] = ()
) -> Division:
    """Raises the same sentence on every rank, or returns who holds what. `ends` are those of packed sequences."""
    fields = _fields(inputs, config, parallel, return_stats, ends)
    q_len, k_len = inputs.query.shape[2], inputs.key.shape[2]
    segments = parallel.segments or ()
    numbers = [len(fields), q_len, k_len, *segments, *[0] * (MOST_SEGMENTS - len(segments))]
    everyone = _gathered(numbers + [field.number for field in fields], parallel)
    for rank, theirs in enumerate(everyone):
        if theirs[0] == REFUSED:
            raise RuntimeError(f"Rank {rank} refused its inputs, and all ranks must compute together: see its error.")
    lengths = [theirs[1:3] for theirs in everyone]
    cut = [tuple(theirs[3 : 3 + MOST_SEGMENTS]) for theirs in everyone]
    for n, field in enumerate(fields):
        values = [theirs[3 + MOST_SEGMENTS + n] for theirs in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            said = "" if field.digest else f": {values[0]} and {values[other]}"
            raise ValueError(f"Ranks 0 and {other} were called with different {field.name}{said}.")
    if parallel.segments is not None:
        for rank, ((rows, keys), parts) in enumerate(zip(lengths, cut, strict=True)):
            if not rows == keys == sum(parts):
                raise ValueError(
                    f"On rank {rank} the segments {parts[: len(segments)]} must come to the number of its rows and of "
                    f"its keys, {rows} and {keys}."
                )
    rows_cut, keys_cut = (
        tuple(cut) if parallel.segments is not None else tuple((pair[n],) for pair in lengths) for n in (0, 1)
    )
    return Division(shares_of(rows_cut, parallel.sharding), shares_of(keys_cut, parallel.sharding))


def _fields(
    inputs: Inputs, config: SparseConfig, parallel: Parallel, return_stats: bool, ends: Sequence[list[int]]
) -> list[Field]:
    query, key, value, sight = inputs.query, inputs.key, inputs.value, inputs.visibility
    return [
        Field("batch sizes", query.shape[0]),
        Field("numbers of query heads", query.shape[1]),
        Field("numbers of key heads", key.shape[1]),
        Field("head_dim", query.shape[3]),
        Field("value head_dim", value.shape[3]),
        Field("dtypes", _digest(query.dtype), digest=True),
        Field("kinds of device", _digest(query.device.type), digest=True),
        Field("is_causal or window", _digest((sight.left, sight.right)), digest=True),
        Field("key padding (a mask on one, None on the other)", int(sight.key_valid is not None), digest=True),
        Field("scale", _digest(inputs.scale), digest=True),
        Field("config", _digest(config.encoded), digest=True),
        Field("return_lse", int(bool(inputs.needs_lse)), digest=True),
        Field("return_stats", int(bool(return_stats)), digest=True),
        Field("sharding", _digest(parallel.sharding), digest=True),
        Field("numbers of segments", len(parallel.segments or ())),
        Field("functions or sequence ends", _digest(list(ends)), digest=True),
    ]


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def _gathered(numbers: list[int], parallel: Parallel) -> list[list[int]]:
    """Every rank's numbers. All messages have one length, whatever a rank has to say."""
    padded = numbers + [0] * (MOST_NUMBERS - len(numbers))
    message = torch.tensor(padded, dtype=torch.int64)
    return [x.tolist() for x in parallel.gather(message, [MOST_NUMBERS] * parallel.size, 0, SETTINGS)]
