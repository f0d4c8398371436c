"""The proof of one GPU, tried without one: how parts end, and the figures of a replayed stage."""

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import REPOSITORY, launcher

from omnibal.cost.analytic import model_flops
from omnibal.job.replay import REPLAY_FILES
from scripts.gpu_proof import parts
from scripts.gpu_proof.page import tables_of, write_page
from scripts.gpu_proof.parts import PARTS
from scripts.gpu_proof.result import Machine, PartResult, Proof
from scripts.gpu_proof.running import Context, run_part
from scripts.gpu_proof.settings import FAKE_DEVICE, REAL, TINY

NO_MACHINE = Machine(device=None, memory_gib=None, cuda=None, python="3", versions={})


def context_of(folder: Path, limit_s=60.0, pretended=True) -> Context:
    end_s = time.monotonic() + limit_s
    given = {"settings": TINY, "pretended": pretended, "end_s": end_s}
    return Context(output=folder, **given)


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_a_part_ends_as_its_programs_do(tmp_path):
    """Prevents: a proof that stops at the first failure, or that calls a failed part ok."""
    good = program(tmp_path, "print('hello')")

    def passes(context: Context) -> None:
        context.run("good", good)
        assert "hello" in (tmp_path / "logs" / "good.txt").read_text()
        context.figures["found"] = 1

    def fails(context: Context) -> None:
        context.figures["before"] = 2
        context.run("bad", program(tmp_path, "print('error: no such thing'); raise SystemExit(2)"))

    def breaks(context: Context) -> None:
        raise KeyError("figure")

    results = [run_part("x", part, context_of(tmp_path)) for part in (passes, fails, breaks)]
    assert [(one.status, one.reason, one.figures) for one in results[1:]] == [
        ("failed", "bad: error: no such thing", {"before": 2}),
        ("failed", "KeyError: 'figure'", {}),
    ]
    assert (results[0].status, results[0].figures) == ("ok", {"found": 1})


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    """Prevents: a program that holds the device, or the proof, after its part is over."""
    left = tmp_path / "pid"
    started = (
        "import subprocess, sys, time, pathlib\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"pathlib.Path({str(left)!r}).write_text(str(one.pid))\n"
        "time.sleep(3600)\n"
    )
    slow, context = program(tmp_path, started), context_of(tmp_path, limit_s=5)
    result = run_part("slow", lambda context: context.run("slow", slow), context)
    assert result.status == "timed-out"
    assert not _is_running(int(left.read_text()))
    late = run_part("late", lambda context: None, context_of(tmp_path, limit_s=-1))
    assert (late.status, late.reason) == ("skipped", "no time was left")


def _is_running(pid: int) -> bool:
    """Whether a process that is not ours to wait for still runs."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.1)
    return True


def test_tests_are_told_one_by_one():
    """Prevents: failed tests that are lost in what pytest prints, alone or with workers."""
    printed = """
tests/training/test_cuda.py::test_on_device[checkpoint] PASSED          [ 10%]
[gw1] [ 20%] FAILED tests/training/test_cuda.py::test_on_device[weight_gradients]
[gw0] [ 30%] SKIPPED tests/training/test_cuda.py::test_other
"""
    assert parts.tested(printed) == {
        "test_on_device[checkpoint]": "passed",
        "test_on_device[weight_gradients]": "failed",
        "test_other": "skipped",
    }


def test_all_parts_fit_into_ten_minutes_of_a_device():
    """Prevents: a proof that is cut off by the ten minutes that a command may take."""
    assert REAL.limits_s.keys() == PARTS.keys() == FAKE_DEVICE.limits_s.keys()
    assert sum(REAL.limits_s.values()) <= 9 * 60 - 10


def test_the_page_shows_all_that_was_found(tmp_path):
    """Prevents: a figure of proof.json that no reader of the page sees, and markup in a reason."""
    stages = [{"stage": 0, "measured_ms": 123.4, "mfu": 0.412}]
    part = PartResult(
        name="replay", status="failed", reason="<b> & more", seconds=3.0,
        figures={"plan": "a model", "stages": stages, "tests": {"test_one[x]": "passed"}},
    )  # fmt: skip
    proof = Proof(machine=NO_MACHINE, pretended=True, parts=(part,))
    write_page(proof, tmp_path / "proof.html")
    page = (tmp_path / "proof.html").read_text()
    for text in ("&lt;b&gt; &amp; more", "a model", "123", "41.2%", "test one (x)", "fake device"):
        assert text in page
    assert "<b> &" not in page and len(tables_of(proof)) == 4


def test_without_a_device_it_says_so(tmp_path):
    """Prevents: a proof of nothing, and a traceback on a machine without a GPU."""
    for arguments, words in (((), "no CUDA device"), (("--tiny",), "without --fake-device")):
        ended = launcher().run("-m", "scripts.gpu_proof", tmp_path / "out", *arguments)
        assert ended.returncode == 2 and words in ended.stderr
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="fake devices are compiled")
def test_a_stage_is_tried_without_a_device(tmp_path):
    """Prevents: a dry run that does not come as far as a device would be asked."""
    ended = launcher().run(
        "-m", "scripts.gpu_proof", tmp_path / "out", "--fake-device", "--tiny", "--only", "replay"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = Proof.model_validate_json((tmp_path / "out" / "proof.json").read_text())
    [part] = found.parts
    assert found.pretended and part.status == "ok"
    [stage] = part.figures["stages"]
    assert stage["allocated_gib"] == pytest.approx(stage["predicted_gib"], rel=0.5)
    assert 0 < stage["element_wise_share"] < 1


def test_a_replayed_stage_stands_beside_its_prediction(tmp_path, monkeypatch):
    """Prevents: figures of other packs or stages than those replayed."""

    def run_forked(command, log, limit_s, environment) -> int:
        ended = launcher().run(*command[1:], **environment)
        log.write(ended.stdout + ended.stderr)
        return ended.returncode

    monkeypatch.setattr("scripts.gpu_proof.running.run_within", run_forked)
    context = context_of(tmp_path, limit_s=900, pretended=False)
    result = run_part("replay", PARTS["replay"], context)
    assert result.status == "ok", result.reason
    [stage] = result.figures["stages"]
    assert stage["measured_ms"] > 0 and stage["measured_gib"] > 0
    files = parts.open_plan(tmp_path / "plan")
    [measured] = REPLAY_FILES.read(tmp_path / "replay", len(files.plan.stages))
    # All stages together need what the whole model needs.
    features, plan = np.array([[1, 8, 256, 256**2, 100]]), files.plan
    each = [parts.stage_flops(files, number, features) for number in range(len(plan.stages))]
    whole = model_flops(plan.model, plan.cluster, ())
    assert sum(each) == pytest.approx(float((features @ whole).sum())) and min(each) > 0
    assert 0 < stage["mfu"] < 1
    computed_ms = sum(measured.forward_ms) + sum(measured.backward_ms)
    assert stage["measured_ms"] == pytest.approx(computed_ms)
    cluster = plan.cluster.model_copy(update={"intra_node_gb_per_s": 1e-3})
    slow = replace(files.job, cluster=cluster)
    assert parts.predicted_ms(files, slow, measured) == pytest.approx(stage["predicted_ms"])


@pytest.mark.parametrize("has_numpy", [True, False])
def test_the_numpy_of_a_python_stays(tmp_path, has_numpy):
    """Prevents: a newer numpy in front of the one that goes with the machine's torch."""
    script, wheels, log = tmp_path / "scripts" / "gpu_proof.sh", tmp_path / "w", tmp_path / "log"
    script.parent.mkdir()
    wheels.mkdir()
    shutil.copy(REPOSITORY / "scripts" / "gpu_proof.sh", script)
    for name in ("numpy-2.4.6-cp312.whl", "scipy-1.17.1-cp312.whl"):
        (wheels / name).touch()
    python = program(
        tmp_path,
        f"""#!/usr/bin/env bash
[[ $2 == *numpy* ]] && exit {int(not has_numpy)}
echo "$*" >> "{log}"
""",
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "WHEELS": str(wheels)}
    subprocess.run([script, tmp_path / "out"], env=environment, check=True)
    installed = next(line for line in log.read_text().splitlines() if "pip install" in line)
    assert "/scipy-1" in installed and ("/numpy-2" in installed) != has_numpy
