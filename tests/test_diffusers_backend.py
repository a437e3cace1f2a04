"""The name "sparge" in diffusers: what it computes when nothing is known of the model, and over several devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import refused
from small_diffusers import SMALL, diffusers, output
from torch import Tensor

import sparge
from sparge.integrations import fallback
from sparge.integrations.diffusers import backend, registration

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::sparge.DenseAttentionWarning"),
    pytest.mark.usefixtures("one_thread"),
]
host = diffusers.models.attention_dispatch


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    fallback._said.clear()
    active = host._AttentionBackendRegistry._active_backend
    yield
    host._AttentionBackendRegistry.set_active_backend(active)  # which set_attention_backend changes for everybody


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        seen.append(arguments)
        return sparge.attention(*tensors, **arguments)

    monkeypatch.setattr(backend, "attention", attention)
    return seen


def qkv(length: int = 150, keys: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, n, 4, 24, dtype=dtype) for n in (length, keys or length, keys or length)]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


# ---- by name


@pytest.mark.parametrize(("name", "sparse"), [("flux", 2), ("wan", 2), ("hunyuan", 2), ("ltx", 2)])
def test_models_by_name(name: str, sparse: int, calls: list[Any]) -> None:
    """With the default settings, which compute calls as short as these dense: the result is that of before."""
    one = SMALL[name]
    model = one.built()
    want = output(model, **one.inputs)
    model.set_attention_backend("sparge")
    close(output(model, **one.inputs), want)
    assert [call["config"] for call in calls] == [sparge.SparseConfig()] * sparse  # cross-attention is not among them
    model.set_attention_backend("native")
    assert torch.equal(output(model, **one.inputs), want)


def test_as_a_context_manager_of_diffusers(calls: list[Any]) -> None:
    one = SMALL["wan"]
    model = one.built()
    with host.attention_backend("sparge"):
        output(model, **one.inputs)
    output(model, **one.inputs)
    assert len(calls) == 2


def test_a_patch_goes_before_the_name(calls: list[Any]) -> None:
    one, config = SMALL["wan"], sparge.SparseConfig(gap=7.0)
    model = one.built()
    model.set_attention_backend("sparge")
    sparge.patch(model, config)
    output(model, **one.inputs)
    assert [call["config"] for call in calls] == [config] * 2
    sparge.unpatch(model)
    calls.clear()
    with sparge.patch(model, config, dense_layers=1):
        output(model, **one.inputs)
    assert [call["config"] for call in calls] == [config]
    calls.clear()
    with sparge.patch(model, config, dense_steps=1):
        output(model, **one.inputs)
    assert not calls


def test_the_name_is_known_whichever_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, sparge; assert 'diffusers' not in sys.modules; import diffusers.models.attention_dispatch as host;"
        "assert host.AttentionBackendName('sparge') in host._AttentionBackendRegistry.list_backends()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(host._AttentionBackendRegistry, "_backends", {})
    registration.register_with_diffusers()  # as `import sparge` does after `import diffusers`
    assert list(host._AttentionBackendRegistry._backends.values()) == [backend.sparge_backend]


def test_a_diffusers_without_a_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host, "_AttentionBackendRegistry")
    registration.register_with_diffusers()  # says nothing
    with refused(ImportError, "diffusers from 0.35 on", "_AttentionBackendRegistry"):
        registration.register()


def test_the_constant_is_like_the_others() -> None:
    names = host.AttentionBackendName
    assert names("sparge") is names.SPARGE is names["SPARGE"]
    assert names.SPARGE == "sparge"
    assert names.SPARGE in list(names)
    assert repr(names.SPARGE) == "<AttentionBackendName.SPARGE: 'sparge'>"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mask", [None, "two", "four"])
def test_calls_of_the_dispatcher(mask: str | None, calls: list[Any]) -> None:
    tensors = qkv()
    seen = None if mask is None else torch.rand(2, 150) > 0.3
    seen = seen[:, None, None] if mask == "four" else seen
    arguments = {"attn_mask": seen, "scale": 0.3}
    want = host.dispatch_attention_fn(*tensors, **arguments, backend="native")
    close(host.dispatch_attention_fn(*tensors, **arguments, backend="sparge"), want)
    assert len(calls) == 1


def test_calls_that_are_dense_as_meant(calls: list[Any]) -> None:
    for tensors in (qkv(150, 40), qkv(10)):  # cross-attention, and too few rows
        want = host.dispatch_attention_fn(*tensors, backend="native")
        assert torch.equal(host.dispatch_attention_fn(*tensors, backend="sparge"), want)
    assert not calls


@pytest.mark.parametrize(
    ("dtype", "more", "why"),
    [
        (torch.float64, {}, "float64"),
        (torch.float32, {"attn_mask": torch.randn(150, 150)}, "attn_mask"),
        (torch.float32, {"attn_mask": torch.ones(2, 4, 150, 150, dtype=torch.bool).tril()}, "attn_mask"),
        (torch.float32, {"dropout_p": 1e-9}, "dropout_p"),
    ],
)
def test_calls_that_sparge_cannot_compute(dtype: torch.dtype, more: Any, why: str, calls: list[Any]) -> None:
    tensors = qkv(dtype=dtype)
    want = host.dispatch_attention_fn(*tensors, **more, backend="native")
    with pytest.warns(sparge.DenseAttentionWarning, match=why):
        got = host.dispatch_attention_fn(*tensors, **more, backend="sparge")
    assert torch.equal(got, want)
    host.dispatch_attention_fn(*tensors, **more, backend="sparge")  # which says nothing more
    assert not calls


def test_compiled_by_name() -> None:
    config, tensors = sparge.SparseConfig(), qkv(600)
    attend = torch.compile(
        lambda *x: host.dispatch_attention_fn(*x, backend=host.AttentionBackendName.SPARGE),
        fullgraph=True,
        backend="eager",
    )
    close(attend(*tensors), sparge.attention(*tensors, config=config, layout="BSHD"))
    twice = [x.double() for x in tensors]
    with pytest.warns(sparge.DenseAttentionWarning, match="float64"):
        got = attend(*twice)
    close(got, host.dispatch_attention_fn(*twice, backend="native"))
    torch.compiler.reset()


def test_no_lse() -> None:
    with refused(ValueError, "return_lse", "sparge.attention"):
        host.dispatch_attention_fn(*qkv(), attention_kwargs={"return_lse": True}, backend="sparge")


# ---- several devices


def over_two(**split: Any) -> SimpleNamespace:
    degrees = {"ring_degree": 1, "ulysses_degree": 1, "ulysses_anything": False, **split}
    return SimpleNamespace(context_parallel_config=SimpleNamespace(**degrees))


def test_parts_of_unknown_length_are_refused() -> None:
    with refused(ValueError, "ulysses_anything"):
        backend.sparge_backend(*qkv(), _parallel_config=over_two(ulysses_degree=2, ulysses_anything=True))


def test_masks_are_refused_in_a_ring() -> None:
    with refused(ValueError, "attn_mask", "ring_degree"):
        backend.sparge_backend(*qkv(), torch.ones(2, 150).bool(), _parallel_config=over_two(ring_degree=2))


def test_a_ring_of_two_processes(tmp_path: Path) -> None:
    """Each with a half of the tokens of a Wan whose backend is sparge: exact, and sparse as in one process."""
    assert told_by_two("diffusers_ring.py", tmp_path) == [
        ["exact", "sparse as in one process", "a patch is refused", "4 calls in a ring"]
    ] * 2  # fmt: skip


def test_ulysses_in_two_processes(tmp_path: Path) -> None:
    """Each with a half of the tokens of a patched Flux: exact, and sparse as in one process."""
    assert told_by_two("ulysses.py", tmp_path) == [["exact", "sparse as in one process", "4 calls by sparge"]] * 2


def told_by_two(script: str, folder: Path) -> list[list[str]]:
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder / "meeting")]
    both = [subprocess.Popen([*command, rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in "01"]
    lines = []
    for one in both:
        told, failed = one.communicate(timeout=240)
        assert one.returncode == 0, failed.decode()[-3000:]
        lines.append(told.decode().splitlines())
    return lines
