"""Runs that are planned anew while they train, or after they have lost devices."""

import json
from pathlib import Path

import pytest
from end_to_end_cases import (
    losses,
    pair_succeeds,
    plan_of,
    ranks_succeed,
    records,
    training,
)

from omnibal.job.plan import read_plan, write_plan
from omnibal.model.units import unit_names
from omnibal.pipeline.unit_runs import stages_from_cuts

EVERY_STEP = ("--save-interval", "1", "--no-async-save")


@pytest.fixture(scope="module")
def uneven(lengths, tmp_path_factory) -> Path:
    """A plan of two stages, of which the first has all but a layer and the head."""
    folder = tmp_path_factory.mktemp("plans") / "uneven"
    plan_of(lengths, folder, "--pp", "2", "--epochs", "4")
    plan = read_plan(folder)
    cut = len(unit_names(plan.model)) - 2
    stages = stages_from_cuts(plan.model, (cut,))
    write_plan(plan.model_copy(update={"stages": stages, "prediction": None}), folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(uneven, digits, tmp_path_factory) -> Path:
    save = tmp_path_factory.mktemp("runs") / "whole"
    pair_succeeds(*training(uneven, digits, save, "--train-iters", "12"))
    return save


def trained(save: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["samples_sha256"]) for record in records(save)]


def test_a_run_is_planned_anew_while_it_trains(uneven, uninterrupted, digits, tmp_path):
    """Prevents: a new plan that trains other samples, or from other weights; against a run that
    keeps its plan."""
    save = tmp_path / "run"
    output = pair_succeeds(
        *training(uneven, digits, save, "--train-iters", "12", "--replan-at", "8")
    )
    assert "planned anew after step 8" in output
    assert [path.name for path in (save / "plans").iterdir()] == ["step_0000008_gpus_2"]
    assert trained(save) == trained(uninterrupted)
    assert losses(save) == pytest.approx(losses(uninterrupted), rel=1e-4)
    assert losses(save)[:8] == losses(uninterrupted)[:8]
    info = json.loads((save / "run.json").read_text())
    assert info["since_step"] == 8
    resumed = training(uneven, digits, save, "--train-iters", "14", "--load", save)
    assert f"going on with {save / 'plans' / 'step_0000008_gpus_2'}" in pair_succeeds(*resumed)


def test_a_run_goes_on_on_fewer_devices(lengths, uninterrupted, digits, tmp_path):
    """Prevents: a job that stands still for a lost node, or trains samples twice; two ranks, then
    one, then two, against a run without a loss."""
    wide, save = tmp_path / "wide", tmp_path / "run"
    plan_of(lengths, wide, "--dp", "2", "--epochs", "4")
    steps = tmp_path / "whole"
    ranks_succeed(2, *training(wide, digits, steps, "--train-iters", "6"))
    run = training(wide, digits, save, "--elastic", *EVERY_STEP)
    ranks_succeed(2, *run, "--train-iters", "2")
    assert "planned for the 1 processes" in ranks_succeed(1, *run, "--train-iters", "4")
    ranks_succeed(2, *run, "--train-iters", "6")
    assert trained(save) == trained(steps)
    assert losses(save)[:2] == losses(steps)[:2]
    assert losses(save) == pytest.approx(losses(steps), rel=1e-4)
