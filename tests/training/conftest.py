"""Multi-process tests fork their ranks from this process, which has imported torch and Megatron.

A launched process would spend ten seconds on imports; a forked one starts in a fifth of a second.
"""

import os
from functools import partial

import pytest
import torch
from data_cases import Data, noisy_pictures
from ranks import run_alone

from megatron.vlm.backend import prepare_megatron_core
from omnibal.model.parallel import Parallel

# Before any parallel region: a forked child cannot use its parent's threads.
torch.set_num_threads(1)
# A fork spoils torch's pool of threads. In its CUDA build several threads of autograd find out at
# once, and one may abort; so each child renews the pool before it has any.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
prepare_megatron_core()


@pytest.fixture(autouse=True)
def only_ranks_run_backwards(monkeypatch):
    """Under torch's CUDA build, ranks forked from a process that has run a backward cannot."""
    parent, engine = os.getpid(), torch.autograd.Variable._execution_engine

    class Engine:
        def __getattr__(self, name):
            assert os.getpid() != parent or name != "run_backward", (
                "a backward in the tests' own process; use run_ranks, or mark it in_own_process"
            )
            return getattr(engine, name)

    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine())


@pytest.fixture
def small_buckets(monkeypatch):
    """Makes a toy stage's parameters many buckets, as a real one's are."""
    monkeypatch.setattr(Parallel, "bucket_parameters", property(lambda self: 500))


@pytest.fixture(scope="session")
def data(digits, tokenizer) -> Data:
    """The digits' training samples."""
    return Data(digits / "train" / "meta.json", tokenizer)


@pytest.fixture
def pictures(tmp_path, tokenizer) -> Data:
    """Seven samples of five noisy photographs."""
    return noisy_pictures(tmp_path, tokenizer)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is marked so in a forked process, with the fixtures of this one."""
    if pyfuncitem.get_closest_marker("in_own_process") is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_alone(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True
