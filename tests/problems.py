"""What the tests share: seeded problems, plain attention to compare with, backends by name, how errors must look."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparge import BlockMask, SparseConfig
from sparge.backends import BACKENDS
from sparge.backends.hopper import launch as hopper
from sparge.inputs import Inputs, prepare_inputs
from sparge.stages import Output

EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")
BY_NAME = {backend.name: backend for backend in BACKENDS}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels run on the CPU, slowly


def each_backend(*left_out: str):
    """Parametrises a test over the backends; those this machine cannot run are skipped, with their reason."""
    cases = [
        pytest.param(name, marks=pytest.mark.skipif(bool(backend.unavailable()), reason=str(backend.unavailable())))
        for name, backend in BY_NAME.items()
        if name not in left_out
    ]
    return pytest.mark.parametrize("backend", cases)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(
    seed: int = 0,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    q_len: int = 200,
    k_len: int | None = None,
    dim: int = 16,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    contrast: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v, heads first. With contrast, all queries like some runs of 32 keys better than others."""
    kv_heads, k_len = kv_heads or heads, k_len or q_len
    q = randn(3 * seed, batch, heads, q_len, dim)
    k = randn(3 * seed + 1, batch, kv_heads, k_len, dim)
    v = randn(3 * seed + 2, batch, kv_heads, k_len, v_dim or dim)
    if contrast:
        liking = randn(3 * seed + 3, batch, kv_heads, -(-k_len // 32), 1).repeat_interleave(32, 2)[:, :, :k_len]
        q, k = q + 1.0, k + contrast * liking / dim**0.5
    return q.to(dtype), k.to(dtype), v.to(dtype)


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
    layout: str = "BHSD",
) -> Inputs:
    padding = None if key_valid is None else key_valid[:, None, None, :]
    return prepare_inputs(
        q, k, v, padding, is_causal=is_causal, scale=scale, enable_gqa=True, window=window, layout=layout
    )


def on_its_device(backend: str, inputs: Inputs) -> Inputs:
    """The same problem where the backend runs."""
    if backend not in ("triton", "hopper", "dense") or INTERPRETED or not torch.cuda.is_available():
        return inputs
    valid = inputs.visibility.key_valid
    sight = replace(inputs.visibility, device=torch.device("cuda"), key_valid=None if valid is None else valid.cuda())
    query, key, value = (x.cuda() for x in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value, visibility=sight)


@contextmanager
def hopper_slack(bits: float):
    """Hopper's kernel with another slack. At 0 probabilities are relative to the running maximum, as in the oracle."""
    normal = hopper.SLACK
    try:
        hopper._plan.cache_clear()
        hopper.SLACK = bits
        yield
    finally:
        hopper.SLACK = normal
        hopper._plan.cache_clear()


def run(backend: str, inputs: Inputs, config: SparseConfig, mask: BlockMask | None = None) -> Output:
    """One backend's own pipeline, whatever the dispatcher would choose."""
    stages, inputs = BY_NAME[backend], on_its_device(backend, inputs)
    refusal = stages.unsupported(inputs, config)
    if refusal:
        pytest.skip(f"{backend}: {refusal}")
    blocks = stages.summarize(inputs, config)
    if mask is not None:
        mask = replace(mask, bits=mask.bits.to(inputs.query.device))
    out = stages.attend(blocks, stages.select(blocks, config) if mask is None else mask, config)
    return Output(out.values.cpu(), None if out.lse is None else out.lse.cpu(), out.skipped_pv.cpu())


def seen_pairs(
    q_len: int,
    k_len: int,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """bool [B or 1, q_len, k_len], pair by pair from the definition: row r stands at key r + k_len - q_len."""
    left, right = (math.inf if side in (None, -1) else side for side in window or (None, None))

    def sees(row: int, key: int) -> bool:
        ahead = key - (row + k_len - q_len)
        return -left <= ahead <= right and not (is_causal and ahead > 0)

    seen = torch.tensor([[[sees(row, key) for key in range(k_len)] for row in range(q_len)]])
    return seen if key_valid is None else seen & key_valid[:, None]


def token_mask(mask: BlockMask) -> Tensor:
    """A block mask, pair by pair: bool [B, H, q_len, k_len]."""
    rows, keys = mask.block
    wide = mask.to_dense().repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return wide[:, :, : mask.q_len, : mask.k_len]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """float64 softmax attention over `seen` [B or 1, (H or 1,) Nq, Nk], and its LSE; for finite inputs."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = seen[:, None] if seen.dim() == 3 else seen
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ v / total, 0.0), total[..., 0].log()


def relative_l1(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().sum() / want.double().abs().sum())


@contextmanager
def refused(kind: type[Exception], *words: str):
    """The block must raise exactly this type, in one sentence that holds all these words."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (its type is checked below)
        yield
    message = str(caught.value)
    assert type(caught.value) is kind, f"raised {type(caught.value).__name__}: {message}"
    assert message.endswith("."), message
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message, f"{word!r} is not said in: {message}"


def without_probe(config):
    """The other rules alone; where there is none, a row's best block is kept, as by a gap of 0."""
    others = tuple(name for name in config.rule if name != "probe")
    default = {"probe": SparseConfig.probe, "probe_rows": SparseConfig.probe_rows}
    return replace(config, rule=others or "gap", gap=config.gap if others else 0.0, **default)
