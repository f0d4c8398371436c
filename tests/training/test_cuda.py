"""The trainer on a CUDA device, in a process where the device is visible."""

import os
import shutil
import subprocess
from pathlib import Path

import cuda_checks
import pytest
from commands import launcher
from pipeline_cases import pipeline_plan
from programs import REPOSITORY, import_path, run_program
from ranks import run_ranks

from megatron.vlm.inputs.batch import MicroBatch
from omnibal.model.config import load_model


def has_device() -> bool:
    """Return whether nvidia-smi lists a device. CUDA is hidden from torch in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


@pytest.mark.skipif(not has_device(), reason="no CUDA device: nvidia-smi lists none")
def test_on_device(tmp_path, monkeypatch):
    """Prevents code or compiled kernels that are only right on a CPU. See each check."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = run_program(cuda_checks.__file__, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_checks_of_a_device_run_as_far_as_a_cpu_goes(tmp_path):
    """Prevents device checks that fail before they use the device."""
    names = ("idle_experts", "native_resolution", "attention")
    ended = launcher().run(cuda_checks.__file__, tmp_path, *names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = [line.split()[:2] for line in ended.stdout.splitlines()]
    results = ["PASSED", "PASSED", "SKIPPED"]
    assert printed == [list(pair) for pair in zip(results, names, strict=True)]


def test_a_check_that_fails_is_told_and_hides_no_other(tmp_path, capsys):
    """Prevents a failed check that stops the later checks or hides its reason."""

    def broken(folder):
        raise ValueError("of this")

    assert not cuda_checks.run(broken, tmp_path)
    printed = capsys.readouterr().out
    assert "ValueError: of this" in printed and "\nFAILED broken" in printed


def test_programs_import_what_the_tests_do(monkeypatch):
    """Prevents checks without Megatron-core if it comes from a folder on PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["packages", "more"]))
    expected = [str(REPOSITORY), "fake", "packages", "more"]
    assert import_path(Path("fake")).split(os.pathsep) == expected
    monkeypatch.delenv("PYTHONPATH")
    assert import_path() == str(REPOSITORY)


def learn_on_a_cpu(links, plan):
    """Return losses, and the devices that micro-batches were moved to."""
    moved, to = [], MicroBatch.to
    MicroBatch.to = lambda batch, device: moved.append(device) or to(batch, device)
    return cuda_checks.train_on_one_pack(links, plan, 3, (20, 30, 9), 25), moved


def test_the_check_at_real_size_gets_as_far_as_computing():
    """Prevents a real-size device check that fails before it uses the device."""
    paper = load_model("internvl-chat-1.5-6b-20b")
    model = cuda_checks.real_size_plan().model
    for own, whole in ((model.vision, paper.vision), (model.language, paper.language)):
        assert (own.hidden_size, own.layers) == (whole.hidden_size, 2)
    plan = pipeline_plan().model_copy(update={"precision": "bf16"})
    [(losses, moved)] = run_ranks(plan.parallel, learn_on_a_cpu, plan)
    assert len(losses) == 4 and len(moved) == 1
