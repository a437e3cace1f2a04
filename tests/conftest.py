"""Set-up of every test: no AMX (some machines advertise it and cannot use it), hypothesis, poisoned memory."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported

import pytest
import torch
from hypothesis import settings

from sparge import calls
from sparge.integrations import fallback

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import gluon_interpreter
    import interpreter

    interpreter.install()
    gluon_interpreter.install()

settings.register_profile("sparge", deadline=None, derandomize=True, max_examples=60, print_blob=False)
settings.load_profile("sparge")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    if INTERPRETED:
        gluon_interpreter.begin_test()
    calls.forget()  # what a test has replaced may have been found out before
    fallback._said.clear()  # warnings are given once


@pytest.fixture
def one_thread():
    """For many small problems: waiting for a second thread costs more than it brings, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned(monkeypatch):
    """Every freshly allocated tensor is full of NaN (or of a huge integer), so that memory nobody wrote shows."""

    def poison(allocate):
        def allocate_and_spoil(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(torch.nan)
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max // 2)

        return allocate_and_spoil

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


def pytest_addoption(parser):
    parser.addoption("--shard", default="0/1", help="run every n-th test only, as in 2/8: machines with many cores")


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--shard").split("/"))
    items[:] = items[part::parts]
