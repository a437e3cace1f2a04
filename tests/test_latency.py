"""Whole models, dense and sparse: the real classes at toy sizes, the arithmetic, and what must not be timed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from small_latency import CALLS, SMALL

from sparge.backends.cpu.launch import CpuBackend
from sparge.backends.gather import GatherBackend
from sparge.bench.results import FAILED, MEASURED, NOT_RUN, WRONG
from sparge.integrations import patch as patching
from sparge.integrations.diffusers import hooks
from sparge.latency import build, dense, measure, report
from sparge.latency.build import Place, make_inputs
from sparge.latency.catalogue import MODELS, Paper
from sparge.latency.dense import DenseAttention
from sparge.latency.measure import Settings, own_format
from sparge.latency.results import Results, Row, Shape, Times, amdahl

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")  # tiny problems: a second thread only waits
CPU = Settings(torch.device("cpu"), torch.float32, 3, "none")
ALL = sorted(SMALL)


def measured(name: str, settings: Settings = CPU, **changes) -> Row:
    pytest.importorskip(SMALL[name].library)
    return measure.measure(replace(SMALL[name], **changes), settings)


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi asks for float32 there
@pytest.mark.parametrize("name", ALL)
def test_every_layer_is_sparse_and_nothing_skipped_is_dense(name: str) -> None:
    row = measured(name)
    assert row.outcome == MEASURED, row.reason
    assert row.shape is not None
    assert row.times is not None
    assert row.shape.calls == CALLS[name.partition("-")[0]]
    assert row.call_error is not None
    assert row.step_error is not None
    assert max(row.call_error, row.step_error) < 1e-5
    assert row.backends in (("cpu",), ("torch",))
    assert 0 < row.skipped < row.asked_sparsity  # the text, the first block and the diagonal stay
    assert len(row.times.dense_steps) == len(row.times.sparse_steps) == CPU.steps
    assert min(*row.times.dense_steps, *row.times.sparse_steps) > 0
    assert row.shape.causal == name.startswith("llama")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_true_sizes_are_those_of_the_models(model) -> None:
    """Parameters and attention tokens, without making a single weight."""
    pytest.importorskip(model.library)
    billions = {"llama": 8.03, "flux": 11.9, "cogvideox": 1.69, "wan-1.3b": 1.42, "wan-14b": 14.3, "mochi": 10.0}
    tokens = {"flux": 4608, "cogvideox": 17776, "wan-1.3b": 32760, "wan-14b": 75600, "mochi": 22516, "hunyuan": 119056}
    network = build.build(model, Place(torch.device("meta"), torch.bfloat16))
    found = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    known = {**billions, "hunyuan": 12.8}
    assert found == pytest.approx(known.get(model.name, known["llama"]), rel=0.01)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    in_attention = model.visual + (0 if model.name.startswith("wan") else model.text)
    assert in_attention == tokens.get(model.name, model.text)
    inputs = make_inputs(model, network, Place(torch.device("meta"), torch.bfloat16))
    lengths = {value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor)}
    assert lengths <= {model.batch, model.visual, model.text}


def test_sixteen_bits_are_close_enough() -> None:
    row = measured("llama-24k", replace(CPU, dtype=torch.bfloat16))
    assert row.outcome == MEASURED, row.reason
    assert 0 < row.step_error < measure.MAX_STEP_ERROR[torch.bfloat16] / 10


def test_a_format_left_open_may_leave_short_calls_dense_and_says_so() -> None:
    row = measured("llama-24k", replace(CPU, quantization="auto"))
    assert row.outcome == MEASURED
    assert row.backends == ("dense",)
    assert row.skipped == 0


def test_a_wrong_attention_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (CpuBackend, GatherBackend):
        attend = backend.attend
        monkeypatch.setattr(
            backend, "attend", lambda self, *x, attend=attend: replace(attend(self, *x), values=x[0].inputs.query * 0)
        )
    row = measured("llama-24k")
    assert row.outcome == WRONG
    assert row.times is None
    assert row.reason.startswith("with nothing skipped an attention call is off by 1 ")


def test_tokens_put_in_order_without_their_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.OrderRotary, "__call__", lambda self, module, args, output: output)
    row = measured("wan-1.3b")
    assert row.outcome == WRONG
    assert row.reason.startswith("with nothing skipped the model is off by ")


def test_a_layer_that_stays_dense_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def but_one(model, config=None, dry_run=False):
        return patching.patch(model, config, dry_run=dry_run, dense_layers=0 if dry_run else 1)

    monkeypatch.setattr(measure, "patch", but_one)
    row = measured("llama-24k")
    assert row.outcome == WRONG
    assert row.reason == "1 of 2 attention calls of a sparse step came to sparge."


def test_a_model_that_fails_is_a_row() -> None:
    row = measured("llama-24k", config={**SMALL["llama-24k"].config, "num_key_value_heads": 3})
    assert row.outcome == FAILED
    assert row.reason


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    row = measure.measure(SMALL["flux"], CPU)
    assert row.outcome == NOT_RUN
    assert row.reason == ("Flux, 1024 x 1024 is built by diffusers, which is not installed: pip install diffusers.")
    assert "not run, no time: Flux" in report.line(row)


def test_masks_that_hide_nothing_are_not_handed_to_dense_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(dense, "torch_attention", lambda *x, **more: seen.append(more["attn_mask"]))
    query, attend = torch.zeros(1, 1, 4, 16), DenseAttention()
    idle, working = torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([True, True, True, False])[None, None, None]
    for mask in (idle, working, None, idle):
        attend(query, query, query, attn_mask=mask, enable_gqa=False)
    assert [x is None for x in seen] == [True, False, True, True]


def test_the_first_kernel_that_takes_a_call_is_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(1, 4, 32, 16), torch.randn(1, 2, 32, 16)
    arguments = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": None, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, **arguments)
    tried = []
    own = dense.torch_attention

    def refusing_groups(*tensors, **more):
        tried.append(more["enable_gqa"])
        if more["enable_gqa"]:
            raise RuntimeError("No available kernel.")
        return own(*tensors, **more)

    monkeypatch.setattr(dense, "sdpa_kernel", lambda kernel: nullcontext())  # which CPUs do not have
    monkeypatch.setattr(dense, "torch_attention", refusing_groups)
    way = dense._first_way(query, key, key, arguments)
    assert way.name == "cuDNN, K and V repeated"
    assert tried == [True, False]
    torch.testing.assert_close(way.attend(query, key, key, arguments), expected)


def test_a_call_that_does_not_fit_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*tensors, **more):
        raise torch.OutOfMemoryError("memory is full")

    monkeypatch.setattr(dense, "torch_attention", full)
    query = torch.zeros(1, 1, 4, 16)
    with pytest.raises(torch.OutOfMemoryError):
        dense._first_way(query, query, query, {"attn_mask": None, "enable_gqa": False})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama-24k", "mochi", "hunyuan"])
def test_on_a_gpu(name: str) -> None:
    device = torch.device("cuda", 0)
    row = measured(name, Settings(device, torch.bfloat16, 3, own_format(device)))
    assert row.outcome == MEASURED, row.reason
    assert row.backends in (("hopper",), ("triton",))
    assert row.dense_kernels != ("torch SDPA",)
    assert row.peak_gib > 0


def test_amdahl() -> None:
    assert amdahl(0.0, 4.0) == 1
    assert amdahl(1.0, 4.0) == 4
    assert amdahl(0.6, 3.0) == pytest.approx(1 / 0.6)
    times = Times((105.0, 100.0, 99.0), (61.0, 62.0, 70.0), 60.0, 20.0)
    assert (times.dense, times.sparse) == (100.0, 62.0)
    assert times.speedup == pytest.approx(100 / 62)
    assert times.share == pytest.approx(0.6)
    assert times.attention_speedup == pytest.approx(3.0)
    assert times.achieved == pytest.approx(60 / 62)
    assert replace(times, dense_attention=300.0).share == 1


def test_the_bar_and_the_table() -> None:
    good = Times((100.0,) * 3, (62.0,) * 3, 60.0, 20.0)
    paper = Paper(0.47, 1.83, "L40")
    shape = Shape(22516, 24, 24, 128, 2, False, 96)
    row = Row(
        "a", "A", MEASURED, paper=paper, shape=shape, skipped=0.465, quantization="int8-fp8", backends=("hopper",),
        dense_kernels=("cuDNN",), times=good,
    )  # fmt: skip
    slow = replace(row, title="B", times=replace(good, sparse_steps=(70.0,) * 3))
    results = Results("today", "sparge", {"gpu": "G"}, {}, {}, (row, slow, Row("c", "C", NOT_RUN, "no reason.")))
    text = report.table(results)
    assert "| 96 x 2 x 22516 tokens, 24 heads of 128 | 46.5% | int8-fp8 (hopper) | 0.1 | 0.062 | **1.61x** |" in text
    assert "96.8% (reached) | 1.83x on L40, 47.0% skipped |" in text
    assert "85.7% (bar 95% missed)" in text
    assert "- C: no reason." in text
    assert [row["derived"]["passes"] for row in json.loads(results.to_json())["rows"][:2]] == [True, False]
    assert Results.from_json(results.to_json()) == results


def test_the_format_is_named_so_that_short_calls_are_sparse_too() -> None:
    assert own_format(torch.device("cpu")) == "none"
