"""Layers of Transformer Engine, over a stand-in for it: the real one cannot be had without CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.vlm.model.providers import check_provider
from omnibal.errors import UserError

REPOSITORY, HERE = Path(__file__).parents[2], Path(__file__).parent


def test_both_providers_make_the_same_model():
    """Prevents: parameters of other names, shapes or divisions, checkpoints that one provider
    writes and the other cannot load, and arguments that Transformer Engine does not take."""
    path = os.pathsep.join(map(str, (REPOSITORY, HERE / "fake_te")))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "provider_checks.py")],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_provider_that_is_not_installed_is_refused(monkeypatch):
    """Prevents: a traceback from Megatron-core after all ranks have joined."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_provider("local")
    with pytest.raises(UserError, match=r"Transformer Engine.*not installed.*omnibal\[cuda\]"):
        check_provider("te")
