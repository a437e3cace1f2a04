"""`with sparge.patched():` for code that calls torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparge.api import attention
from sparge.config import SparseConfig
from sparge.distributed.context import in_block
from sparge.integrations.fallback import FEW, FEW_ROWS, as_autocast, dense_anyway, refusal, refuse_dense_shard
from sparge.observe import note_dense


@dataclass
class Calls:
    """What happened to the calls of one `patched` block; str() is a list."""

    sparse: int = 0
    dense: Counter[str] = field(default_factory=Counter)  # by reason

    def __str__(self) -> str:
        reasons = [f"{count} dense: {reason}" for reason, count in self.dense.most_common()]
        return "\n".join([f"{self.sparse} sparse, {self.dense.total()} dense", *reasons])


@dataclass(frozen=True)
class _Block:
    config: SparseConfig
    calls: Calls

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        """Sparse where sparge can, else torch's own."""
        is_causal = arguments["is_causal"]
        reason = _why_dense(query, key, arguments["attn_mask"], is_causal)
        if reason is None:
            query, key, value = as_autocast(query, key, value)
            if is_causal:  # top-left: keys after the last row are seen by none
                key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
            operands = (query, key, value, self.config)
            reason = refusal(*operands, **arguments) or dense_anyway(*operands, **arguments)
        if reason is not None:
            refuse_dense_shard(reason)
            self.calls.dense[reason] += 1
            note_dense(reason)
            return torch_attention(query, key, value, **arguments)
        self.calls.sparse += 1
        return attention(query, key, value, **arguments, config=self.config)


Attend = Callable[..., Any]  # with the arguments of torch's function, those after value by name

_attend: ContextVar[Attend | None] = ContextVar("sparge_attend", default=None)
_lock = threading.Lock()
_open_blocks = 0
_torch_attention: Callable[..., Any] = functional.scaled_dot_product_attention


@contextmanager
def patched(config: SparseConfig | None = None) -> Iterator[Calls]:
    """Inside the block, torch.nn.functional.scaled_dot_product_attention is sparse where sparge can be, else itself.

    Only in this thread (or asyncio task), and only for code that looks the function up when it calls it. Arguments
    mean what they mean in torch: is_causal aligns top-left. Code under torch.compile stays dense. Blocks may be nested;
    the innermost counts. The Calls that it gives say how many calls were sparse, and why the others were not.

    >>> q = torch.randn(1, 1, 4096, 64)
    >>> with patched() as calls:
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> print(calls)
    1 sparse, 0 dense
    """
    if config is not None and not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a sparge.SparseConfig, not {type(config).__name__}.")
    block = _Block(SparseConfig() if config is None else config, Calls())
    with redirected(block.attend):
        yield block.calls


@contextmanager
def redirected(attend: Attend) -> Iterator[None]:
    """Inside the block and in this thread, calls of torch's function go to `attend`."""
    _enter()
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)
        _leave()


def torch_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    """torch's own function, also while calls of it are redirected."""
    own = _torch_attention if _open_blocks else functional.scaled_dot_product_attention
    return own(query, key, value, **arguments)


def _enter() -> None:
    """The function is swapped for all threads by the first block that opens; who is in no block notices nothing."""
    global _open_blocks, _torch_attention
    with _lock:
        if _open_blocks == 0:
            _torch_attention = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = _attention
        _open_blocks += 1


def _leave() -> None:
    global _open_blocks
    with _lock:
        _open_blocks -= 1
        if _open_blocks == 0:
            functional.scaled_dot_product_attention = _torch_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Stands in for torch's function while a block is open in any thread."""
    arguments: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa
    }  # fmt: skip
    attend = None if torch.compiler.is_compiling() else _attend.get()
    return (attend or _torch_attention)(query, key, value, **arguments)


def _why_dense(query: Any, key: Any, attn_mask: Tensor | None, is_causal: bool) -> str | None:
    """What torch takes in another sense than sparge, and what is too short to gain."""
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or min(query.dim(), key.dim()) < 2:
        return "query and key must be tensors."  # torch will say so
    sharded = in_block()
    if query.shape[-2] <= FEW_ROWS and not sharded:
        return FEW + "."
    if is_causal and attn_mask is not None:
        return "what a mask beside is_causal means depends on torch's kernel."
    if is_causal and query.shape[-2] > key.shape[-2]:
        return "is_causal with more rows than keys aligns top-left, which sparge does not."
    if is_causal and query.shape[-2] != key.shape[-2] and sharded:
        return "is_causal with unequal lengths aligns top-left, which sparge does not for shards."
    return None
