"""Fused operations compiled for a CPU; test_cuda.py runs them on a device."""

import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from programs import run_program

from megatron.vlm.model.fused import compiled


def test_compiled_bodies_compute_what_is_written(tmp_path):
    """Prevents a fused operation that fails to compile or computes other results when compiled,
    otherwise seen only on a GPU."""
    assert shutil.which("g++"), "install g++, which compiles bodies for a CPU"
    # The compiler's command line does not quote torch's folder, which may contain a space.
    installed = tmp_path / "installed"
    installed.symlink_to(Path(find_spec("torch").origin).parent.parent)
    inductor = {"CACHE_DIR": str(tmp_path / "compiled"), "COMPILE_THREADS": "1"}
    ended = run_program(
        Path(__file__).with_name("fused_checks.py"),
        "cpu",
        imports=(installed,),
        **{f"TORCHINDUCTOR_{name}": value for name, value in inductor.items()},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "compiled 19 bodies" in ended.stdout


@pytest.mark.in_own_process
def test_every_operation_has_its_own_recompilations(monkeypatch):
    """Prevents backwards that share one limit of recompilations, above which a device runs eager
    code with more memory than is counted."""
    monkeypatch.setattr(compiled, "is_compiled", lambda first: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    limit = {"recompile_limit": 2, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limit):
        for name in ("first", "second", "third"):
            double = compiled.differentiable(name)(lambda values: 2 * values)
            for dtype in (torch.float32, torch.bfloat16):
                values = torch.ones(4, dtype=dtype, requires_grad=True)
                double(values).sum().backward()
                assert values.grad.tolist() == [2.0] * 4
