"""The backend for vLLM, against stand-ins for the parts of vLLM 0.32 that it touches: vLLM itself is not run here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from problems import EXACT, refused
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge.integrations import fallback
from sparge.integrations.vllm import plugin, prefill

pytestmark = [pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"), pytest.mark.usefixtures("one_thread")]
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16


class Support(Enum):
    ALWAYS = 3
    UNIFORM_SINGLE_TOKEN_DECODE = 1


@dataclass
class Metadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    scheduler_metadata: Any = None
    causal: Any = True
    mm_prefix_query_range_tensor: Any = None
    rswa_prefix_lens: Any = None


class Builder:
    _cudagraph_support = Support.ALWAYS

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Metadata:
        return Metadata(
            int(common.query_start_loc[-1]), common.max_query_len, common.query_start_loc, common.max_seq_len,
            common.seq_lens, common.block_table_tensor, common.slot_mapping, "planned",
        )  # fmt: skip


class Impl:
    """vLLM's own attention over pages, one request at a time; notes what it was asked for."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **special: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes, self.sinks, self.logits_soft_cap = special.get("alibi_slopes"), special.get("sinks"), 0
        self.logits_soft_cap = special.get("logits_soft_cap", 0)
        self.sliding_window, self.attn_type = special.get("sliding_window", (-1, -1)), "decoder"
        self.dense_rows: list[int] = []

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, metadata: Metadata, output: Tensor,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if metadata is None:
            return output.fill_(0)
        starts = metadata.query_start_loc.tolist()
        assert starts[-1] == metadata.num_actual_tokens
        assert len(metadata.seq_lens) == len(metadata.block_table) == len(starts) - 1
        for n, length in enumerate(metadata.seq_lens.tolist()):
            rows, taken = slice(starts[n], starts[n + 1]), kv_cache[metadata.block_table[n, : -(-length // PAGE)]]
            k, v = taken.permute(1, 0, 2, 3).flatten(1, 2)[:, :length].split(self.head_size, -1)
            count = starts[n + 1] - starts[n]
            self.dense_rows.append(count)
            seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            q = query[rows].transpose(0, 1)
            out = scaled_dot_product_attention(
                q[None], k[None], v[None], seen if metadata.causal else None, scale=self.scale, enable_gqa=True
            )
            output[rows] = out[0].transpose(0, 1).reshape(output[rows].shape)
        return output


class Registry:
    def __init__(self) -> None:
        self.path: str | None = None

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str:
        assert self.path is not None
        return self.path


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stand-ins under vLLM's names, and sparge's backend built on them."""
    fallback._said.clear()
    custom = Registry()
    running = SimpleNamespace(additional_config={"sparge": {"rule": "topk", "topk": 1.0, "quantization": "none"}})
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: running},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"AttentionCGSupport": Support},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.flash_attn": {
            "FlashAttentionBackend": object, "FlashAttentionImpl": Impl, "FlashAttentionMetadataBuilder": Builder
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM=custom),
            "register_backend": lambda member, path: setattr(member, "path", path),
        },
    }  # fmt: skip
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(prefill, "LONG", 100)
    monkeypatch.delitem(sys.modules, "sparge.integrations.vllm.backend", raising=False)
    yield SimpleNamespace(
        backend=importlib.import_module("sparge.integrations.vllm.backend"), custom=custom, running=running
    )
    sys.modules.pop("sparge.integrations.vllm.backend")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and keys of the calls that sparge computed."""
    seen: list[tuple[int, int]] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        seen.append((query.shape[1], key.shape[1]))
        assert arguments["config"] == EXACT
        return sparge.attention(query, key, value, **arguments)

    monkeypatch.setattr(prefill, "attention", attention)
    return seen


class Batch:
    """Requests by (rows, length), their keys and values in pages that are not in order."""

    def __init__(self, *requests: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
        rows, lengths = [row for row, _ in requests], [length for _, length in requests]
        count, widest = sum(rows), -(-max(lengths) // PAGE)
        tables = torch.randperm(len(requests) * widest).view(len(requests), widest)
        self.kv_cache = torch.randn(tables.numel(), KV_HEADS, PAGE, 2 * DIM, dtype=dtype)
        self.query = torch.randn(count, HEADS, DIM, dtype=dtype)
        self.output = torch.full((count, HEADS * DIM), torch.nan, dtype=dtype)
        starts = torch.tensor([0, *rows]).cumsum(0)
        self.common = SimpleNamespace(
            query_start_loc=starts.int(), query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths),
            seq_lens_cpu_upper_bound=torch.tensor(lengths), max_query_len=max(rows), max_seq_len=max(lengths),
            block_table_tensor=tables, slot_mapping=torch.arange(count),
        )  # fmt: skip

    def through(self, impl: Any, builder: Any, **changed: Any) -> Tensor:
        metadata = builder.build(0, self.common)
        for name, value in changed.items():
            setattr(metadata, name, value)
        return impl.forward(None, self.query, None, None, self.kv_cache, metadata, self.output.clone())


def layer(vllm: Any, **special: Any) -> Any:
    return vllm.backend.SpargeImpl(HEADS, DIM, 0.2, KV_HEADS, **special)


@pytest.mark.parametrize(
    ("requests", "sparse", "dense"),
    [
        ([(120, 120)], [(120, 120)], []),
        ([(120, 300)], [(120, 300)], []),  # a chunk after a cached prefix
        ([(1, 200), (120, 120), (1, 50), (40, 200), (30, 30)], [(120, 120), (40, 200)], [1, 1, 30]),
        ([(1, 200), (1, 300)], [], [1, 1]),
        ([(120, 120), (0, 0), (17, 100)], [(120, 120), (17, 100)], []),  # with a row of padding
    ],
)
def test_batches(requests: Any, sparse: Any, dense: Any, vllm: Any, calls: list[Any]) -> None:
    batch, impl = Batch(*requests), layer(vllm)
    got = batch.through(impl, vllm.backend.SpargeMetadataBuilder())
    assert impl.dense_rows == dense
    assert calls == sparse
    torch.testing.assert_close(got, batch.through(Impl(HEADS, DIM, 0.2, KV_HEADS), Builder()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("special", "changed", "why"),
    [
        ({"alibi_slopes": torch.ones(HEADS)}, {}, "alibi_slopes"),
        ({"sinks": torch.zeros(HEADS)}, {}, "sinks"),
        ({"logits_soft_cap": 30.0}, {}, "logits_soft_cap"),
        ({"sliding_window": (99, 0)}, {}, "sliding_window"),
        ({}, {"causal": False}, "more than causal"),
        ({}, {"rswa_prefix_lens": torch.ones(1)}, "more than causal"),
        ({}, {"dtype": torch.float64}, "float64"),
        ({}, {"shape": True}, "KV cache of shape"),
    ],
)
def test_what_sparge_cannot_compute_is_vllms_own(
    special: Any, changed: Any, why: str, vllm: Any, calls: list[Any]
) -> None:
    changed = dict(changed)
    batch, impl = Batch((120, 120), (1, 50), dtype=changed.pop("dtype", torch.float32)), layer(vllm, **special)
    if changed.pop("shape", False):
        impl.num_kv_heads = 3
    builder = vllm.backend.SpargeMetadataBuilder()
    with pytest.warns(sparge.DenseAttentionWarning, match=why):
        got = batch.through(impl, builder, **changed)
    assert torch.equal(got, batch.through(Impl(HEADS, DIM, 0.2, KV_HEADS), Builder(), **changed))
    assert impl.dense_rows == [120, 1]
    assert not calls


def test_a_profiling_run_and_a_batch_of_unknown_lengths(vllm: Any, calls: list[Any]) -> None:
    impl, batch = layer(vllm), Batch((120, 120))
    assert impl.forward(None, batch.query, None, None, batch.kv_cache, None, batch.output.clone()).eq(0).all()
    batch.common.seq_lens_cpu_upper_bound = None
    batch.through(impl, vllm.backend.SpargeMetadataBuilder())
    assert impl.dense_rows == [120]
    assert not calls


def test_settings_come_from_vllms_own(vllm: Any) -> None:
    assert layer(vllm).sparge_config == EXACT
    vllm.running.additional_config = {}
    assert layer(vllm).sparge_config == sparge.SparseConfig()
    vllm.running.additional_config = {"sparge": {"rule": "best"}}
    with refused(ValueError, "rule", "best"):
        layer(vllm)


def test_what_the_backend_says_of_itself(vllm: Any) -> None:
    backend = vllm.backend.SpargeBackend
    assert (backend.get_name(), backend.get_impl_cls()) == ("CUSTOM", vllm.backend.SpargeImpl)
    assert backend.get_builder_cls()._cudagraph_support == Support.UNIFORM_SINGLE_TOKEN_DECODE


def test_the_entry_point(vllm: Any) -> None:
    (found,) = (one for one in entry_points(group="vllm.general_plugins") if one.name == "sparge")
    assert found.load() is plugin.register
    plugin.register()
    plugin.register()
    module, name = vllm.custom.path.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is vllm.backend.SpargeBackend
    vllm.custom.path = "other.Backend"
    with pytest.warns(UserWarning, match=r"CUSTOM is other\.Backend already"):
        plugin.register()
    assert vllm.custom.path == "other.Backend"
