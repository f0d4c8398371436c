"""Multi-process tests fork their ranks from this process, which has imported torch and Megatron.

A launched process would spend ten seconds on imports; a forked one starts in a fifth of a second.
"""

import os

import pytest
import torch

from megatron.vlm.backend import prepare_megatron_core

# Before any parallel region: a forked child cannot use its parent's threads.
torch.set_num_threads(1)
prepare_megatron_core()


@pytest.fixture(autouse=True)
def only_ranks_run_backwards(monkeypatch):
    """Under torch's CUDA build, ranks forked from a process that has run a backward cannot."""
    parent, backward = os.getpid(), torch.autograd.backward

    def in_rank(*arguments, **options):
        assert os.getpid() != parent, "a backward in the tests' own process; use run_ranks"
        backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", in_rank)
