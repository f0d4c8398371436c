"""Stages on a fake device; each check runs in a process that has prepared no other."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from commands import launcher
from length_cases import lengths_of
from toy import toy_model

from megatron.vlm.measure.fake_device import job
from megatron.vlm.measure.replay_job import load_replay
from omnibal.base.errors import UserError
from omnibal.job.check import open_plan
from omnibal.job.fake_replay import FAKE_REPLAY_FILES, FakeStage, read_fake_stages
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData, SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

CASES = Path(__file__).with_name("fake_device_cases.py")
STAGES = (
    *("units_kept", "whole_stages", "scheduled_stages", "adapted_stages", "encoders_beside"),
    *("images_beside", "tied", "building", "levels", "device_checks", "planted"),
)
"""Cases that build and run stages."""


def succeed(*command: object, **environment: str) -> str:
    ended = launcher().run(*command, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def said() -> str:
    """What one process says that goes through all stages."""
    ended = launcher().run(CASES, *STAGES)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("case", STAGES)
def test_stages_need_what_plans_say(said, case):
    """Prevents: a stage that a device cannot build or run, or that fits on paper only. See each
    case in fake_device_cases.py."""
    assert f"passed {case}" in said, said


def test_what_is_counted_of_single_operations():
    """Prevents: bytes, launches, host reads or refusals other than those counted by hand."""
    cases = ("memory", "attention", "refusals", "host_reads", "counts")
    said = succeed(CASES, *cases)
    assert [f"passed {case}" in said for case in cases] == [True] * len(cases)


def planned_for(folder, parallel, data):
    """The directory of a plan for the toy model."""
    cluster = load_cluster("h100-80g")
    whole = JobSpec(model=toy_model(), cluster=cluster, parallel=parallel, precision="bf16")
    save_plan(make_plan(PlanRequest(job=whole, data=data)), folder / "plan")
    return folder / "plan"


@pytest.fixture
def planned(tmp_path):
    """A plan of shapes for two stages."""
    data = MockData(caps=Caps.of(tiles=3, tokens=100), micro_batches_per_step=4)
    return planned_for(tmp_path, Parallel(pipeline=2, data=2), data)


def test_the_command_goes_on_and_reports(planned, tmp_path):
    """Prevents: work that is done twice, output that is no JSON, and times shown as if measured."""
    kept = tmp_path / "kept"
    command = ("tools/replay.py", planned, "--fake-device", "-o", kept)
    first = json.loads(succeed(*command, "--stages", "1", "--json"))
    assert [one["stage"] for one in first["stages"]] == [1]
    written = (kept / "fake_device_1.json").stat()
    stages = json.loads(succeed(*command, "--json"))["stages"]
    assert (kept / "fake_device_1.json").stat().st_mtime_ns == written.st_mtime_ns
    assert [one["stage"] for one in stages] == [0, 1]
    for one in stages:
        total = one["state_gib"] + one["activations_gib"]
        assert one["allocated_gib"] == pytest.approx(total) and one["predicted_gib"] > 0
        assert sum(part["gib"] for part in one["contents"]) == pytest.approx(total)
        assert one["kernels"] > 0 and 0 < one["element_wise_share"] < 1
    page = tmp_path / "report.html"
    report = ("-m", "omnibal", "report", planned, "--replay", kept, "-o", page)
    shown = json.loads(succeed(*report, "--json"))
    assert [one["allocated_gib"] for one in shown["fake_device"]] == [
        one["allocated_gib"] for one in stages
    ]
    assert "replay" not in shown
    text = page.read_text()
    assert "the code would allocate on one device" in text and "replayed, GiB" not in text


def test_weights_that_ranks_divide_are_counted_and_not_replayed(tmp_path):
    """Prevents: a rank alone that gathers weights from nobody, and empty micro-batches, which join
    other ranks' and have no row among the packs, taken for rows of the next rank."""
    lengths = lengths_of(tiles=[1] * 13, tokens=[100] * 13, loss_tokens=[20] * 13)
    levels = (Level(caps=Caps.of(tiles=3, tokens=100)),)
    data = SampleData(lengths=lengths, packs_per_step=4, levels=levels)
    plan = planned_for(tmp_path, Parallel(pipeline=1, data=2, sharded=2), data)
    replayed = load_replay(plan, None, None)
    rows, packs = replayed.workload, replayed.packs
    assert np.ptp(np.bincount(packs.dp_rank)) > 0  # so that there are empty ones
    assert [*zip(rows.step, rows.dp_rank, rows.slot, strict=True)] == [
        *zip(packs.step, packs.dp_rank, packs.slot, strict=True)
    ]
    command = ("tools/replay.py", plan, "-o", tmp_path / "out")
    ended = launcher().run(*command)
    assert ended.returncode == 2 and "--fake-device" in ended.stderr
    assert not (tmp_path / "out").exists()
    [counted] = json.loads(succeed(*command, "--fake-device", "--json"))["stages"]
    assert any(part["operation"] == "resize_" and part["gib"] for part in counted["contents"])


def test_what_is_missing_or_of_another_plan_is_said(planned, tmp_path):
    """Prevents: a traceback where g++ is missing, and another plan's figures in a report."""
    command = ("tools/replay.py", planned, "--fake-device", "-o", tmp_path / "kept")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    ended = launcher().run(*command, PATH=os.fspath(nowhere))
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "g++" in line and not (tmp_path / "kept").exists()
    ended = launcher().run("tools/replay.py", planned, "--json", "-o", tmp_path / "other")
    assert ended.returncode == 2 and "--fake-device" in ended.stderr
    (tmp_path / "kept").mkdir()
    info = {"plan_sha256": "0" * 64, "torch": "2", "trainer_sha256": "0" * 64}
    (tmp_path / "kept" / "fake_device.json").write_text(json.dumps(info))
    ended = launcher().run(*command)
    assert ended.returncode == 2 and "another plan" in ended.stderr


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (("--steps", "5"), "--steps: says what is timed"),
        (("--repetitions", "2"), "--repetitions: says what is timed"),
        (("--provider", "te"), "Transformer Engine"),
    ],
)
def test_options_that_a_fake_device_cannot_obey_are_refused(planned, tmp_path, option, expected):
    """Prevents: an option that is taken and does nothing."""
    ended = launcher().run(
        "tools/replay.py", planned, "--fake-device", *option, "-o", tmp_path / "o"
    )
    assert ended.returncode == 2 and expected in ended.stderr
    assert not (tmp_path / "o").exists()


def test_a_fake_stage_is_the_one_of_its_name(planned, tmp_path):
    """Prevents: a stage's figures shown as another's, as a file was copied or renamed."""
    plan = open_plan(planned).plan
    for stage in range(2):
        counted = FakeStage(
            stage=0, predicted_gib=None, allocated_gib=3.0, state_gib=2.0, activations_gib=1.0,
            peak_phase="forward", peak_at="", rows=(0,), micro_batches=1, kernels=1, tflop=1.0,
            gigabytes=1.0, contents=(), operations=(), host_reads=(), unaligned=(),
        )  # fmt: skip
        FAKE_REPLAY_FILES.file_of(tmp_path, stage).write_text(counted.model_dump_json())
    with pytest.raises(UserError, match=r"_1\.json: holds stage 0, and by its name stage 1"):
        read_fake_stages(tmp_path, plan)


def test_what_was_counted_is_of_the_compiled_part_too(planned, tmp_path, monkeypatch):
    """Prevents: figures of an earlier device.cpp that pass for those of the one there is."""
    plan = open_plan(planned).plan
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    monkeypatch.setattr(job, "_TRAINER", trainer)
    hashes = []
    for name, text in (("a.py", "1"), ("b.cpp", "1"), ("b.cpp", "2"), ("c.md", "1")):
        (trainer / name).write_text(text)
        hashes.append(job.fake_replay_info(plan).trainer_sha256)
    assert len(set(hashes)) == 3 and hashes[2] == hashes[3]
