"""Fused operations compiled for a CPU; test_cuda.py runs them on a device."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from programs import run_program


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
