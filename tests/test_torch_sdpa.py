"""`with sparge.patched():` for code that calls torch's attention: the same results, counted, and gone afterwards."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from problems import EXACT, randn, refused, tensors
from torch import Tensor
from torch.nn import functional

import sparge

TORCH = functional.scaled_dot_product_attention
SPARSE = sparge.SparseConfig(quantization="none")  # "auto" finds the calls below too short to gain


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def restored() -> Any:
    yield
    assert functional.scaled_dot_product_attention is TORCH


@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"q_len": 100, "k_len": 170}, {"is_causal": True}),  # torch aligns top-left
        ({"q_len": 100, "k_len": 170}, {}),
        ({"heads": 4, "kv_heads": 2}, {"enable_gqa": True, "scale": 0.3}),
        ({"v_dim": 32}, {"is_causal": True}),
        ({}, {"attn_mask": torch.arange(200)[None, None, None] >= 60}),
        ({}, {"attn_mask": torch.arange(200) < 150}),
    ],
)
def test_what_sparge_takes(sizes: dict[str, int], arguments: dict[str, Any]) -> None:
    q, k, v = tensors(1, batch=2, **sizes)
    if arguments.get("attn_mask") is not None and arguments["attn_mask"].dim() == 1:
        arguments = arguments | {"attn_mask": arguments["attn_mask"][None]}
    with sparge.patched(EXACT) as calls:
        got = functional.scaled_dot_product_attention(q, k, v, **arguments)
    close(got, TORCH(q, k, v, **arguments))
    assert (calls.sparse, calls.dense.total()) == (1, 0)


@pytest.mark.parametrize(
    ("q", "k", "arguments", "reason"),
    [
        ((1, 2, 50, 16), (1, 2, 30, 16), {"is_causal": True}, "aligns top-left"),
        ((1, 2, 4, 16), (1, 2, 90, 16), {}, "query rows gain nothing"),
        ((2, 50, 16), (2, 50, 16), {}, "4 dimensions"),
        ((1, 2, 50, 8), (1, 2, 50, 8), {}, "head_dim 8"),
        ((2, 2, 50, 16), (1, 2, 50, 16), {}, "batch sizes"),
        ((1, 2, 50, 16), (1, 2, 50, 16), {"attn_mask": torch.randn(50, 50)}, "boolean key-padding"),
        ((1, 2, 50, 16), (1, 2, 50, 16), {"attn_mask": torch.arange(50)[None] < 40, "is_causal": True}, "beside"),
        ((1, 2, 50, 16), (1, 2, 50, 16), {"attn_mask": torch.ones(50, 50).tril().bool()}, "attn_mask has shape"),
    ],
)
def test_what_stays_torchs_own(q: Any, k: Any, arguments: dict[str, Any], reason: str) -> None:
    query, key = randn(1, *q), randn(2, *k)
    with sparge.patched(EXACT) as calls:
        got = functional.scaled_dot_product_attention(query, key, key, **arguments)
    assert torch.equal(got, TORCH(query, key, key, **arguments))
    assert calls.sparse == 0
    assert [reason in why for why in calls.dense] == [True]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, about vmap
def test_other_numbers_dropout_gradients_and_subclasses_stay_torchs_own() -> None:
    q = randn(0, 1, 2, 50, 16)
    with sparge.patched() as calls:
        functional.scaled_dot_product_attention(q.double(), q.double(), q.double())
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        learned = q.clone().requires_grad_()
        functional.scaled_dot_product_attention(learned, q, q).sum().backward()
        assert learned.grad is not None
        own = q.as_subclass(type("Own", (Tensor,), {}))
        functional.scaled_dot_product_attention(own, q, q)
        mapped = torch.vmap(functional.scaled_dot_product_attention)(q[None], q[None], q[None])
    close(mapped[0], TORCH(q, q, q))
    assert calls.sparse == 0
    for word in ("float64", "dropout_p", "requires grad", "Own", "torch.func"):
        assert sum(word in reason for reason in calls.dense) == 1, calls
    assert str(calls).startswith("0 sparse, 5 dense\n1 dense: ")


def test_errors_are_torchs_own() -> None:
    q = randn(0, 1, 2, 50, 16)
    with sparge.patched():
        with pytest.raises(RuntimeError, match="size of tensor"):
            functional.scaled_dot_product_attention(q, q, q, torch.ones(50, 40).bool())
        with pytest.raises(TypeError):
            functional.scaled_dot_product_attention(q, None, q)


def test_modules_of_torch_use_it() -> None:
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = randn(0, 2, 90, 64)
    with torch.no_grad():
        want = layer(x, x, x * 2, need_weights=False)[0]
        with sparge.patched(EXACT) as calls:
            got = layer(x, x, x * 2, need_weights=False)[0]
    close(got, want)
    assert calls.sparse == 1


def test_models_of_transformers_use_it() -> None:
    small = pytest.importorskip("small_models")
    model, ids = small.built(small.llama, "sdpa"), small.tokens()
    want = small.output(model, input_ids=ids)
    with sparge.patched(EXACT) as calls:
        close(small.output(model, input_ids=ids), want)
    assert (calls.sparse, calls.dense.total()) == (2, 0)


def test_a_call_that_sparge_computes_dense_is_not_counted_as_sparse() -> None:
    q = randn(0, 1, 1, 4096, 16)
    with sparge.patched() as calls:
        functional.scaled_dot_product_attention(q[:, :, :4095], q, q)
        functional.scaled_dot_product_attention(q, q, q)
    assert (calls.sparse, calls.dense.total()) == (1, 1)
    assert "too short to gain" in str(calls)


def test_the_innermost_block_counts_and_errors_restore() -> None:
    q = randn(0, 1, 2, 50, 16)
    with sparge.patched(SPARSE) as outer:
        with pytest.raises(RuntimeError), sparge.patched(EXACT) as inner:  # noqa: PT012 (one call before the wrong one)
            functional.scaled_dot_product_attention(q, q, q)
            functional.scaled_dot_product_attention(q, q[..., :9], q)
        functional.scaled_dot_product_attention(q, q, q)
        functional.scaled_dot_product_attention(q, q, q)
    assert (outer.sparse, inner.sparse) == (2, 1)
    assert functional.scaled_dot_product_attention is TORCH
    functional.scaled_dot_product_attention(q, q, q)
    assert outer.sparse == 2


def test_other_threads_and_tasks_notice_nothing() -> None:
    q = randn(0, 1, 2, 50, 16)
    inside, left = threading.Event(), threading.Event()

    def in_a_thread() -> None:
        with sparge.patched(SPARSE) as own:
            inside.set()
            assert left.wait(10)
            functional.scaled_dot_product_attention(q, q, q)
        counts.append(own.sparse)

    counts: list[int] = []
    thread = threading.Thread(target=in_a_thread)
    with sparge.patched(SPARSE) as calls:
        thread.start()
        assert inside.wait(10)
        functional.scaled_dot_product_attention(q, q, q)
    functional.scaled_dot_product_attention(q, q, q)  # still swapped, for the other thread
    left.set()
    thread.join()
    assert (calls.sparse, counts) == (1, [1])

    async def task(times: int) -> int:
        with sparge.patched(SPARSE) as own:
            for _ in range(times):
                await asyncio.sleep(0)
                functional.scaled_dot_product_attention(q, q, q)
        return own.sparse

    async def both() -> list[int]:
        return await asyncio.gather(task(2), task(3))

    assert asyncio.run(both()) == [2, 3]


def test_compiled_code_stays_dense() -> None:
    q = randn(0, 1, 2, 50, 16)

    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with sparge.patched(sparge.SparseConfig(rule="topk", topk=0.0, sinks=0)) as calls:
        close(compiled(q), TORCH(q, q, q) + 1)
    close(compiled(q), TORCH(q, q, q) + 1)
    assert (calls.sparse, calls.dense.total()) == (0, 0)
    torch.compiler.reset()


def test_wrong_config() -> None:
    with refused(TypeError, "config", "SparseConfig", "str"), sparge.patched("exact"):
        pass


def test_autocast_decides_the_number_format() -> None:
    q = torch.randn(1, 2, 300, 32)
    with torch.autocast("cpu", torch.bfloat16):
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with sparge.patched(sparge.SparseConfig(rule="topk", topk=1.0, quantization="none")) as calls:
            got = torch.nn.functional.scaled_dot_product_attention(q, q, q.bfloat16())
    assert calls.sparse == 1
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
