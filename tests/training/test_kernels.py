"""Every kernel against plain torch, in Triton's interpreter; test_cuda.py has them on a device."""

from pathlib import Path

from programs import KERNEL_CHECKS, run_program

CHECKS = Path(__file__).parent / "kernel_checks.py"


def test_kernels_compute_what_torch_computes():
    """Prevents: a kernel that gives other numbers or gradients than the layers on a CPU have, or
    other shapes, types or strides than its fake promises to whoever counts without a device."""
    result = run_program(CHECKS, "cpu", *KERNEL_CHECKS, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [f"checked {name}" for name in KERNEL_CHECKS]
