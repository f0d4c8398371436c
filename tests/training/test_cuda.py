"""The same program on a CUDA device; each check runs in a process that may see the device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "cuda_checks.py"


def has_device() -> bool:
    """Whether the driver's own tool lists a device; torch is told here that there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


@pytest.mark.skipif(not has_device(), reason="no CUDA device: nvidia-smi lists none")
@pytest.mark.parametrize(
    "check", ["varlen_attention", "precisions_agree", "real_size_stage", "checkpoint"]
)
def test_on_device(check, tmp_path):
    """Prevents: code that is only right on a CPU. See each check in cuda_checks.py."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    result = subprocess.run(
        [sys.executable, str(CHECKS), check, str(tmp_path)],
        cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
