"""Data in portions through the commands as they are typed."""

import pytest
from end_to_end_cases import (
    losses,
    pair_succeeds,
    plan_of,
    ranks_succeed,
    records,
    succeed,
    training,
)

from omnibal.job.check import open_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult
from omnibal.packing.packs import ScheduledPacks
from omnibal.steps.steps import steps_of


def as_one(packs: ScheduledPacks, data):
    """The data of a plan whose portions are joined, packed by others."""
    found = {
        "method": "other",
        "portions": (),
        "fewest_packs": None,
        "packs_sha256": packs.sha256,
        "steps_sha256": steps_of(packs).sha256,
    }
    return data.model_copy(update=found)


def test_portions_train_as_one_plan_of_the_same_steps(lengths, digits, tmp_path):
    """Prevents: another loss, or a lost step, where a portion ends, a run goes on in one."""
    options = ("--dp", "2", "--portion-samples", "30", "--epochs", "2")
    portions = plan_of(lengths, tmp_path / "portions", *options)
    assert "portions of 2 epochs hold" in succeed("-m", "omnibal", "check", portions)
    files = open_plan(portions)
    packs, every = files.steps
    data = as_one(packs, files.plan.data).model_copy(update={"lengths_sha256": every.sha256})
    whole = files.plan.model_copy(
        update={"data": data, "settings_sha256": None, "prediction": None}
    )
    save_plan(PlanResult(plan=whole, data=(packs, every), search=None), tmp_path / "whole")
    expected = tmp_path / "run_whole"
    pair_succeeds(*training(tmp_path / "whole", digits, expected))
    save = tmp_path / "run"
    stop = files.plan.data.first_steps[2] - 1  # inside the second portion
    pair_succeeds(*training(portions, digits, save, "--train-iters", stop))
    fewer = training(portions, digits, save, "--elastic", "--train-iters", stop + 2)
    assert "planned for the 1 processes" in ranks_succeed(1, *fewer)
    pair_succeeds(*training(portions, digits, save, "--elastic"))
    assert len(losses(save)) == files.plan.data.steps
    assert losses(save)[:stop] == pytest.approx(losses(expected)[:stop], rel=1e-6)
    assert losses(save) == pytest.approx(losses(expected), rel=1e-4)
    assert [each["epoch"] for each in records(save)] == [
        each["epoch"] for each in records(expected)
    ]
    succeed("-m", "omnibal", "report", portions, "--run", save, "-o", tmp_path / "report.html")
