"""What sparge leaves to dense attention, and why: a refusal is a sentence, and each is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparge.backends import choose
from sparge.config import SparseConfig
from sparge.distributed.agreement import refusals_told
from sparge.distributed.context import in_block
from sparge.inputs import prepare_inputs
from sparge.observe import note_dense

FEW_ROWS = 16  # up to this many query rows (decoding, also speculative) prediction costs more than it saves
FEW = f"at most {FEW_ROWS} query rows gain nothing"

_said: set[tuple[str, str]] = set()


class DenseAttentionWarning(UserWarning):
    """Attention that sparge was asked for is computed dense; the message says why."""


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """As torch.compiler.assume_constant_result, whose mere use imports the compiler: more than a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def warn_once(layer: str, reason: str) -> None:
    """Once per kind of layer and reason, counted each time; under torch.compile while it traces."""
    note_dense(reason)
    if (layer, reason) in _said:
        return
    _said.add((layer, reason))
    warnings.warn(f"{layer} stays dense: {reason}", DenseAttentionWarning, stacklevel=2)


def refuse_dense_shard(reason: str) -> None:
    """Dense attention knows nothing of other ranks: a shard's would be wrong, and nobody would notice."""
    if not in_block():
        return
    error = RuntimeError(f"Inside a context_parallel block attention cannot stay dense: {reason}")
    if torch.compiler.is_compiling():
        raise error
    with refusals_told():
        raise error


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's number format where it is on, as torch's own attention takes them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    chosen = torch.get_autocast_dtype(device)
    return tuple(x.to(chosen) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def refusal(query: Tensor, key: Tensor, value: Tensor, config: SparseConfig, **arguments: Any) -> str | None:
    """Why sparge.attention would not take this call, or None; `arguments` are its own."""
    if not torch.compiler.is_compiling():  # which has stand-ins for tensors
        for x in (query, key, value, arguments.get("attn_mask")):
            if isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter):
                return f"sparge takes plain tensors, not {type(x).__name__}."
            if isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
                return "torch.func transforms do not see into sparge."
    try:
        inputs = prepare_inputs(query, key, value, **arguments)
        config.check_heads(inputs.query.shape[1])
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None


def dense_anyway(query: Tensor, key: Tensor, value: Tensor, config: SparseConfig, **arguments: Any) -> str | None:
    """Why sparge.attention itself would compute this call dense, or None; the length of a shard does not tell."""
    if in_block():
        return None
    choice = choose(prepare_inputs(query, key, value, **arguments, needs_lse=False), config)
    return f"{choice.reason}." if choice.backend.name == "dense" else None
