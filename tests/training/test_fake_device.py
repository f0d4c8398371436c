"""Stages on a fake device. Each check runs in a new process."""

import json
from functools import cache

import fake_device_cases
import numpy as np
import pytest
from commands import launcher
from length_cases import lengths_of
from pipeline_cases import MODEL

from megatron.vlm.measure.fake_device import fake_stage
from megatron.vlm.measure.replay_job import load_replay
from omnibal.base.errors import UserError
from omnibal.job.check import open_plan
from omnibal.job.fake_replay import FAKE_REPLAY_FILES, FakeStage, read_fake_stages
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from tests.planner.plan_cases import request

CASES = [case.__name__ for case in fake_device_cases.CASES]


@cache
def run_cases(*cases: str) -> str:
    """Return the output of one process that runs these cases."""
    ended = launcher().run(fake_device_cases.__file__, *cases)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("case", CASES)
def test_stages_need_what_plans_say(case):
    """Prevents bytes or launches unlike hand counts, and stages that fit only in the plan."""
    # The slowest case runs alone, with its own time limit.
    output = run_cases(*(one for one in CASES if (one == "stages") == (case == "stages")))
    assert f"passed {case}" in output, output


def write_plan(folder, *sizes, **data):
    """Return the toy model's plan directory for (pipeline, data, sharded) sizes."""
    parallel = Parallel(**dict(zip(("pipeline", "data", "sharded"), sizes, strict=False)))
    asked = request(
        model=MODEL, cluster=load_cluster("h100-80g"), parallel=parallel, precision="bf16",
        caps=Caps.of(tiles=3, tokens=100), epochs=1, **data,
    )  # fmt: skip
    save_plan(make_plan(asked), folder / "plan")
    return folder / "plan"


@pytest.fixture(scope="module")
def plan_dir(tmp_path_factory):
    """Return a plan of shapes for two stages."""
    return write_plan(tmp_path_factory.mktemp("planned"), 2, 2, lengths=None, packs_per_step=8)


def run_json(*command: object) -> dict:
    ended = launcher().run(*command, "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


def test_the_command_goes_on_and_reports(plan_dir, tmp_path):
    """Prevents repeated work, output that is not JSON, and predicted times shown as measured."""
    kept = tmp_path / "kept"
    command = ("tools/replay.py", plan_dir, "--fake-device", "-o", kept)
    first = run_json(*command, "--stages", "1")
    assert [one["stage"] for one in first["stages"]] == [1]
    written = (kept / "fake_device_1.json").stat()
    stages = run_json(*command)["stages"]
    assert (kept / "fake_device_1.json").stat().st_mtime_ns == written.st_mtime_ns
    assert [one["stage"] for one in stages] == [0, 1]
    for one in stages:
        total = one["state_gib"] + one["activations_gib"]
        assert one["allocated_gib"] == pytest.approx(total) and one["predicted_gib"] > 0
        assert sum(part["gib"] for part in one["contents"]) == pytest.approx(total)
        assert one["kernels"] > 0 and 0 < one["element_wise_share"] < 1
    page = tmp_path / "report.html"
    shown = run_json("-m", "omnibal", "report", plan_dir, "--replay", kept, "-o", page)
    allocated = [[one["allocated_gib"] for one in all_] for all_ in (shown["fake_device"], stages)]
    assert allocated[0] == allocated[1] and "replay" not in shown
    text = page.read_text()
    assert "the code would allocate on one device" in text and "replayed, GiB" not in text


def test_weights_that_ranks_divide_are_counted_and_not_replayed(tmp_path):
    """Prevents a lone rank that gathers from absent ranks, and empty packs read as other ranks'."""
    lengths = lengths_of(tiles=[1] * 13, tokens=[100] * 13, loss_tokens=[20] * 13)
    plan = write_plan(tmp_path, 1, 2, 2, lengths=lengths, packs_per_step=4)
    replayed = load_replay(plan, None, None)
    assert np.ptp(np.bincount(replayed.packs.dp_rank)) > 0  # so that some packs are empty
    for name in ("step", "dp_rank", "slot"):
        assert np.array_equal(*(getattr(of, name) for of in (replayed.workload, replayed.packs)))
    command = ("tools/replay.py", plan, "-o", tmp_path / "out")
    ended = launcher().run(*command)
    assert ended.returncode == 2 and "--fake-device" in ended.stderr
    assert not (tmp_path / "out").exists()
    [counted] = run_json(*command, "--fake-device")["stages"]
    assert any(part["operation"] == "resize_" and part["gib"] for part in counted["contents"])


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ("--fake-device", {"PATH": "/nowhere"}, "g++"),
        ("--json", {}, "--fake-device"),
        ("--fake-device --steps 5", {}, "--steps and --fake-device"),
        ("--fake-device --repetitions 2", {}, "--repetitions and --fake-device"),
        ("--fake-device --provider te", {}, "Transformer Engine"),
    ],
)
def test_what_is_missing_or_does_nothing_is_said(
    plan_dir, tmp_path, options, environment, expected
):
    """Prevents a traceback without g++, and an option that is accepted and has no effect."""
    output = tmp_path / "kept"
    command = ("tools/replay.py", plan_dir, *options.split(), "-o", output)
    ended = launcher().run(*command, **environment)
    assert ended.returncode == 2 and not output.exists()
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert expected in line


def test_another_plans_figures_are_refused(plan_dir, tmp_path):
    """Prevents another plan's figures in a report."""
    info = {"plan_sha256": "0" * 64, "torch": "2", "trainer_sha256": "0" * 64}
    (tmp_path / "fake_device.json").write_text(json.dumps(info))
    ended = launcher().run("tools/replay.py", plan_dir, "--fake-device", "-o", tmp_path)
    assert ended.returncode == 2 and "another plan" in ended.stderr


def test_a_fake_stage_is_the_one_of_its_name(plan_dir, tmp_path):
    """Prevents a stage's figures shown as another's after a file was copied or renamed."""
    for stage in range(2):
        counted = FakeStage(
            stage=0, predicted_gib=None, allocated_gib=3.0, state_gib=2.0, activations_gib=1.0,
            peak_phase="forward", peak_at="", rows=(0,), micro_batches=1, kernels=1, tflop=1.0,
            gigabytes=1.0, contents=(), operations=(), host_reads=(), unaligned=(),
        )  # fmt: skip
        FAKE_REPLAY_FILES.file_of(tmp_path, stage).write_text(counted.model_dump_json())
    with pytest.raises(UserError, match=r"_1\.json: holds stage 0: replay"):
        read_fake_stages(tmp_path, open_plan(plan_dir).plan)


def test_what_was_counted_is_of_the_compiled_part_too(plan_dir, tmp_path, monkeypatch):
    """Prevents reusing figures of an earlier device.cpp."""
    monkeypatch.setattr(fake_stage, "_TRAINER", tmp_path)
    hashes = []
    for name, text in (("a.py", "1"), ("b.cpp", "1"), ("b.cpp", "2"), ("c.md", "1")):
        (tmp_path / name).write_text(text)
        hashes.append(fake_stage.fake_replay_info(open_plan(plan_dir).plan).trainer_sha256)
    assert len(set(hashes)) == 3 and hashes[2] == hashes[3]
