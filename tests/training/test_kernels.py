"""Every kernel against plain torch, in Triton's interpreter; test_cuda.py has them on a device."""

import os
import subprocess
import sys
from pathlib import Path

from import_path import REPOSITORY, import_path

CHECKS = Path(__file__).parent / "kernel_checks.py"
NAMES = ("activations", "residual", "head_norms", "rotary", "normed_rotary", "cross_entropy")


def test_kernels_compute_what_torch_computes():
    """Prevents: a kernel that gives other numbers or gradients than the layers on a CPU have, or
    other shapes, types or strides than its fake promises to whoever counts without a device."""
    environment = {**os.environ, "PYTHONPATH": import_path(), "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, str(CHECKS), "cpu", *NAMES],
        cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [f"checked {name}" for name in NAMES]
