"""Multi-process tests fork their ranks from this process, which has imported torch and Megatron.

Importing takes ten seconds per launched process; forking takes a fifth of a second.
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
# A fork breaks torch's thread pool. In CUDA builds several autograd threads detect this at once,
# and one may abort. So each child renews the pool before it starts threads.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
prepare_megatron_core()


@pytest.fixture(autouse=True)
def only_ranks_run_backwards(monkeypatch):
    """Fail on backwards in this process: under CUDA builds, its forked ranks could not run any."""
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
    """Split a toy stage's parameters into many buckets, as in real stages."""
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
    """Run tests marked `in_own_process` in a forked process, with fixtures of this process."""
    if pyfuncitem.get_closest_marker("in_own_process") is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_alone(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    return True
