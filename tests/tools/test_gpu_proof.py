"""The one-GPU proof, tested on the CPU: status of parts, cards, and replayed-stage figures."""

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import REPOSITORY, launcher

from omnibal.cost.analytic import model_flops
from omnibal.job.replay import REPLAY_FILES
from scripts.gpu_proof import parts, prove
from scripts.gpu_proof.card import Comparison, Machine, PartResult, Proof, card_name, write_card
from scripts.gpu_proof.parts import PARTS
from scripts.gpu_proof.running import FAKE_DEVICE, REAL, Context, run_part

TINY = replace(
    FAKE_DEVICE, model="internvl-digits", sizes=("--tp", "2", "--pp", "2", "--dp", "2"),
    max_tiles=8, max_tokens=256, tokens_per_sample=60, samples=0, micro_batches=2, replayed=(0,),
)  # fmt: skip
NO_MACHINE = Machine(device=None, memory_gib=None, cuda=None, python="3", versions={})


def make_context(folder: Path, limit_s=60.0, on_fake_device=True) -> Context:
    end_s = time.monotonic() + limit_s
    given = {"settings": TINY, "on_fake_device": on_fake_device, "digits": None, "end_s": end_s}
    return Context(output=folder, **given)


def write_program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_a_part_ends_as_its_programs_do(tmp_path):
    """Prevents a proof that stops at the first failure, or reports a failed part as ok."""
    good = write_program(tmp_path, "print('hello')")

    def passes(context: Context) -> None:
        context.run("good", good)
        assert "hello" in (tmp_path / "logs" / "good.txt").read_text()
        context.figures["found"] = 1

    def fails(context: Context) -> None:
        context.figures["before"] = 2
        context.run(
            "bad", write_program(tmp_path, "print('error: no such thing'); raise SystemExit(2)")
        )

    def breaks(context: Context) -> None:
        raise KeyError("figure")

    results = [run_part("x", part, make_context(tmp_path)) for part in (passes, fails, breaks)]
    assert [(outcome.status, outcome.reason, outcome.figures) for outcome in results[1:]] == [
        ("failed", "bad: error: no such thing", {"before": 2}),
        ("failed", "KeyError: 'figure'", {}),
    ]
    assert (results[0].status, results[0].figures) == ("ok", {"found": 1})


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path):
    """Prevents child processes that hold the device after their part timed out."""
    left = tmp_path / "pid"
    started = (
        "import subprocess, sys, time, pathlib\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(3600)']\n"
        "one = subprocess.Popen(command, start_new_session=True)  # as torchrun does\n"
        f"pathlib.Path({str(left)!r}).write_text(str(one.pid))\n"
        "time.sleep(3600)\n"
    )
    slow, limit_s = write_program(tmp_path, started), 2.0
    while not left.exists():  # on a busy machine the program starts later
        limit_s *= 2
        context = make_context(tmp_path, limit_s=limit_s)
        result = run_part("slow", lambda context: context.run("slow", slow), context)
        assert result.status == "timed-out"
    assert not _is_running(int(left.read_text()))


def _is_running(pid: int) -> bool:
    """Whether a process that is not our child still runs after 60 s."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.1)
    return True


def test_a_program_is_told_to_end_and_its_part_goes_on(tmp_path):
    """Prevents a resume test on a run that was killed or had finished: SIGTERM must save."""
    text = """
import pathlib, signal, sys, time
found = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (found.write_text("saved"), sys.exit(1)))
found.write_text("started")
time.sleep(3600)
"""
    found, context = tmp_path / "found", make_context(tmp_path)
    context.run("told", write_program(tmp_path, text), found, until=found.exists)
    assert found.read_text() == "saved"


def test_checks_are_told_one_by_one():
    """Prevents failed checks that are lost in a program's output."""
    printed = "noise\nPASSED fused 4.2 s 0.10 GiB\n  raise\nFAILED checkpoint 1.0 s 2.00 GiB\n"
    assert parts.checks_of(printed) == {
        "fused": "passed in 4.2 s 0.10 GiB", "checkpoint": "failed in 1.0 s 2.00 GiB"
    }  # fmt: skip


def test_all_parts_fit_into_ten_minutes_of_a_device():
    """Prevents part limits that add up to more than ten minutes, a command's limit."""
    assert REAL.limits_s.keys() == PARTS.keys() == FAKE_DEVICE.limits_s.keys()
    assert sum(REAL.limits_s.values()) <= 9 * 60 - 10
    assert list(PARTS) == ["tests", "train", "replay", "checkpoint", "profile", "providers"]


@pytest.mark.parametrize("on_fake_device", [True, False])
def test_the_card_shows_all_that_was_found(tmp_path, on_fake_device):
    """Prevents cards without a figure or a prediction ratio, raw markup, fake devices as GPUs."""
    rows = [Comparison(of="stage 0", unit="ms", predicted=100, measured=123.4)]
    part = PartResult(
        name="replay", status="failed", reason="<b> | more", seconds=3, limit_s=9, comparisons=rows,
        figures={"plan": "a model", "stage 0 MFU": 0.412, "test_one[x]": None},
    )  # fmt: skip
    machine = NO_MACHINE.model_copy(update={"device": None if on_fake_device else "H100 / 80"})
    proof = Proof(machine=machine, on_fake_device=on_fake_device, parts=(part,))
    write_card(proof, tmp_path / "cards", "card")
    card = (tmp_path / "cards" / "card.md").read_text()
    lines = ("| stage 0 | ms | 100 | 123 | 1.23 |", "| replay | stage 0 MFU | 0.412 |")
    for text in (r"\<b\> \| more", "| plan | a model |", r"| test_one\[x\] |  |", *lines):
        assert text in card
    title, said = ("# Fake device", True) if on_fake_device else ("# H100 / 80", False)
    assert card.startswith(f"{title}\n") and ("No figure is of a GPU" in card) == said
    assert Proof.model_validate_json((tmp_path / "cards" / "card.json").read_text()) == proof
    assert on_fake_device or card_name(proof) == "H100-80"


def test_without_a_device_it_says_so(tmp_path):
    """Prevents an empty proof or a traceback on a machine without a GPU."""
    ended = launcher().run("-m", "scripts.gpu_proof", tmp_path / "out")
    assert ended.returncode == 2 and "no CUDA device" in ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [(), ("--only", "tests"), ("--fake-device",)])
def test_only_a_device_and_all_parts_make_a_card_of_the_project(tmp_path, monkeypatch, options):
    """Prevents docs/ cards of fake devices or partial proofs, and mixed results of two proofs."""
    seen = NO_MACHINE.model_copy(update={"device": None if "--fake-device" in options else "B1 x"})
    monkeypatch.setattr(prove, "describe_machine", lambda on_fake_device: seen)
    monkeypatch.setattr(prove, "PARTS", {"tests": lambda context: None})
    monkeypatch.setattr(prove, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_proof.sh", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit, match=r"0|False"):
        prove.main("A proof.")
    assert (tmp_path / "out" / "card.md").exists()
    cards = sorted(path.name for path in (tmp_path / "docs").rglob("*.*"))
    assert cards == ([] if options else ["B1-x.json", "B1-x.md"])
    if "--only" not in options:
        with pytest.raises(SystemExit, match="2"):
            prove.main("A proof.")


@pytest.fixture
def fork_programs(monkeypatch) -> None:
    """Run the proof's programs in processes forked from the launcher."""

    def run_forked(command, log, end_s, environment, until) -> int:
        ended = launcher().run(*command[1:], **environment)
        log.write(ended.stdout + ended.stderr)
        return ended.returncode

    monkeypatch.setattr("scripts.gpu_proof.running.run_within", run_forked)


def test_a_replayed_stage_stands_beside_its_prediction(tmp_path, fork_programs):
    """Prevents figures of packs or stages that were not replayed."""
    context = make_context(tmp_path, limit_s=900, on_fake_device=False)
    result = run_part("replay", PARTS["replay"], context)
    assert result.status == "ok", result.reason
    time_ms, memory = result.comparisons
    assert (time_ms.unit, memory.unit) == ("ms", "GiB") and memory.measured > 0
    files = parts.open_plan(tmp_path / "plan")
    [measured] = REPLAY_FILES.read_stages(tmp_path / "replay", len(files.plan.stages))
    # FLOPs of all stages add up to the model's.
    features, plan = np.array([[1, 8, 256, 256**2, 100]]), files.plan
    each = [parts.stage_flops(files, number, features) for number in range(len(plan.stages))]
    whole = model_flops(plan.model, ())
    assert sum(each) == pytest.approx(float((features @ whole).sum())) and min(each) > 0
    assert 0 < result.figures["stage 0 MFU"] < 1
    computed_ms = sum(measured.forward_ms) + sum(measured.backward_ms)
    assert time_ms.measured == pytest.approx(computed_ms)
    cluster = plan.cluster.model_copy(update={"intra_node_gb_per_s": 1e-3})
    slow = replace(files.job, cluster=cluster)
    assert parts.predicted_ms(files, slow, measured) == pytest.approx(time_ms.predicted)


@pytest.mark.parametrize("has_numpy", [True, False])
def test_a_bundle_is_unpacked_without_a_newer_numpy(tmp_path, has_numpy):
    """Prevents shadowing the machine's numpy, needing pip, and ignoring bundled digits."""
    script, bundle, log = tmp_path / "scripts" / "gpu_proof.sh", tmp_path / "a b", tmp_path / "log"
    script.parent.mkdir()
    shutil.copy(REPOSITORY / "scripts" / "gpu_proof.sh", script)
    (bundle / "digits").mkdir(parents=True)
    with zipfile.ZipFile(bundle / "scipy-1.17-cp312.whl", "w") as wheel:
        wheel.writestr("scipy/__init__.py", "")
    (tmp_path / "module.py").touch()
    with tarfile.open(bundle / "packages.tar.xz", "w:xz") as archive:
        for name in ("numpy", "numpy.libs", "pydantic"):
            archive.add(tmp_path / "module.py", f"{name}/__init__.py")
    python = write_program(
        tmp_path,
        f"""#!/usr/bin/env bash
[[ $2 == *numpy* ]] && exit {int(not has_numpy)}
[[ $2 == *torch* ]] && exit
[[ $2 == scripts* ]] || exec "{sys.executable}" "$@"
echo "$* $PYTHONPATH" >> "{log}"
""",
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "WHEELS": str(bundle)}
    subprocess.run([script, tmp_path / "out"], env=environment, check=True)
    packages = tmp_path / "work" / "gpu_proof_packages"
    archived = {"pydantic"} if has_numpy else {"pydantic", "numpy", "numpy.libs"}
    assert {path.name for path in packages.iterdir()} == {"scipy"} | archived
    started = log.read_text()
    assert str(packages) in started and f"--digits {bundle / 'digits'}" in started


def test_a_bundle_is_made_in_a_new_folder_alone(tmp_path):
    """Prevents a failed bundle from deleting files of an existing folder."""
    (tmp_path / "mine").touch()
    command = [REPOSITORY / "scripts" / "gpu_bundle.sh", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "") and (tmp_path / "mine").exists()
    assert ended.stderr == f"error: {tmp_path} must be a new folder; give another\n"
