"""Transformer Engine layers, over a stand-in for the package, which needs CUDA."""

import sys
from pathlib import Path

import pytest
from commands import launcher
from pipeline_cases import pipeline_plan
from programs import run_program

from megatron.vlm.installed import import_failure
from megatron.vlm.measure.fake_device.fake_stage import check_fake_device
from megatron.vlm.model.providers import check_provider, check_provider_of
from megatron.vlm.model.stage import build_stage
from omnibal.base.errors import UserError

HERE = Path(__file__).parent
TRAINER = ("pretrain_vlm.py", "--plan", "none", "--provider", "te")


def test_both_providers_make_the_same_model():
    """Prevents different parameter names, shapes or checkpoints between providers."""
    program = HERE / "provider_checks.py"
    result = run_program("-W", "ignore", program, imports=(HERE / "fake_te",))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_provider_that_is_not_installed_is_refused(monkeypatch):
    """Prevents a traceback from Megatron-core after all ranks have joined."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_provider("local")
    with pytest.raises(UserError, match=r"Transformer Engine.*not installed.*omnibal\[cuda\]"):
        check_provider("te")


def test_fp8_is_refused_where_nothing_multiplies_in_it(monkeypatch):
    """Prevents FP8 plans that train in bf16, or fail only after all ranks have joined."""
    plan = pipeline_plan().model_copy(update={"precision": "fp8"})
    with pytest.raises(UserError, match=r"fp8.*--provider te"):
        build_stage(plan, 0)
    with pytest.raises(UserError, match="fake device"):
        check_fake_device("fp8", "local")
    providers = "megatron.vlm.model.providers"
    monkeypatch.setattr(f"{providers}.is_te_min_version", lambda version: False)
    monkeypatch.setattr(f"{providers}.get_te_version", lambda: "1.8.0")
    with pytest.raises(UserError, match=r"needs Transformer Engine 2\.2\.0.*1\.8\.0 is installed"):
        check_provider_of(plan, "te")
    for precision in ("fp32", "bf16"):
        check_provider_of(plan.model_copy(update={"precision": precision}), "te")
        check_fake_device(precision, "local")


@pytest.mark.parametrize(
    "mode", ["--dry-run", "--data meta.json --tokenizer-model none --save none"]
)
def test_the_trainer_refuses_it_at_once(mode):
    """Prevents a dry run that passes although the run itself fails."""
    ended = launcher().run(*TRAINER, *mode.split())
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "error: --provider te needs Transformer Engine, which is not installed" in ended.stderr


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_why_a_package_cannot_be_imported_is_kept(tmp_path, monkeypatch, error):
    """Prevents uncaught import errors, and half-imported packages left in sys.modules."""
    package = f"broken_by_{error}"
    (tmp_path / f"{package}.py").write_text(f'raise {error}("libcudnn.so.9: not found\\nat all")')
    monkeypatch.syspath_prepend(tmp_path)
    assert import_failure(package, package) == f"{error}: libcudnn.so.9: not found"
    assert sys.modules.pop(package) is None
    assert import_failure("not_installed_at_all", "not_installed_at_all.torch") is None


def test_one_that_cannot_be_imported_ends_in_one_line(tmp_path):
    """Prevents Megatron-core's traceback about a broken shared library."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("libcudnn.so.9: not found\\nat all")')
    ended = run_program(*TRAINER, "--dry-run", imports=(tmp_path,))
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        "error: --provider te: Transformer Engine is installed, but cannot be imported "
        "(OSError: libcudnn.so.9: not found); repair it, or leave --provider out\n"
    )
