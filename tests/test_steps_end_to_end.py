"""End-to-end runs of windows, mixtures and portions of data."""

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from end_to_end_cases import (
    CAPS,
    PLAN,
    losses,
    pair_succeeds,
    plan_digits,
    ranks_succeed,
    records,
    succeed,
    training,
)

from omnibal.data.lengths import read_lengths
from omnibal.job.check import open_plan
from omnibal.job.plan import read_plan
from omnibal.job.plan_files import iterate_portions, save_plan
from omnibal.job.planner import PlanResult
from omnibal.job.runlog import samples_digest
from omnibal.packing.steps import steps_of


def windows(lengths: Path, output: Path, *options: object) -> Path:
    succeed(*PLAN, *CAPS, "--lengths", lengths, "--window", "26", *options, "-o", output)
    return output


def test_dispatched_windows_have_the_loss_of_the_order_as_read(lengths, digits, tmp_path):
    """Prevents dispatch or a new rank count from changing losses, or training samples twice."""
    as_read = windows(lengths, tmp_path / "as_read", "--dp", "2", "--dispatch", "off")
    three = windows(lengths, tmp_path / "three", "--dp", "3")
    pair = tmp_path / "pair"
    succeed(*PLAN, "--dp", "2", "--steps-of", three, "-o", pair)
    alone = windows(lengths, tmp_path / "alone", "--pp", "2")
    saves = {plan.name: tmp_path / f"run_{plan.name}" for plan in (as_read, three, alone)}
    ranks_succeed(2, *training(as_read, digits, saves["as_read"]))
    ranks_succeed(3, *training(three, digits, saves["three"], "--train-iters", "2"))
    resumed = training(pair, digits, saves["three"], "--load", saves["three"])
    assert "after step 2" in ranks_succeed(2, *resumed)
    ranks_succeed(2, *training(alone, digits, saves["alone"]))
    expected = losses(saves["as_read"])
    assert len(expected) == 4
    seen = [[(one["samples"], one["tokens"]) for one in records(run)] for run in saves.values()]
    assert all(each == seen[0] for each in seen)
    for save in saves.values():
        assert losses(save) == pytest.approx(expected, rel=1e-6)


def test_a_mixture_is_trained_as_often_as_its_plan_says(lengths, digits, tmp_path):
    """Prevents ranks or portions that drop or double a source's repeats."""
    every = read_lengths([lengths])
    names = every.source_names
    in_turn = (Fraction(5, 2), Fraction(1), Fraction(1, 2))
    epochs = {name: in_turn[place % 3] for place, name in enumerate(names)}
    rules = [f"[sources.{name}]\nepochs = {float(times)}\n" for name, times in epochs.items()]
    (tmp_path / "mixture.toml").write_text("".join(rules))
    options = ("--dp", "2", "--portion-samples", "60", "--mixture", tmp_path / "mixture.toml")
    two = plan_digits(lengths, tmp_path / "two", *options)
    succeed(*PLAN, "--steps-of", two, "-o", tmp_path / "one")
    succeed(*training(tmp_path / "one", digits, tmp_path / "run_one"))
    data = read_plan(two).data
    save = tmp_path / "run"
    pair_succeeds(*training(two, digits, save, "--train-iters", data.first_steps[1] + 1))
    pair_succeeds(*training(two, digits, save, "--load", save))
    assert losses(save) == pytest.approx(losses(tmp_path / "run_one"), rel=1e-4)
    trained = Counter[int]()
    logged = {record["step"]: record["samples_sha256"] for record in records(save)}
    for packs, own in iterate_portions(data, two):
        for step in np.unique(packs.step).tolist():
            rows = np.concatenate([packs.packs[row] for row in np.flatnonzero(packs.step == step)])
            assert logged.pop(step) == samples_digest(rows)
            trained.update(own.sample[rows].tolist())
    assert not logged
    for source, (name, times) in enumerate(epochs.items()):
        rows = np.flatnonzero(every.source == source)
        seen = [trained[row] for row in rows.tolist()]
        assert sum(seen) == round(float(times) * len(rows)), name
        assert set(seen) <= {math.floor(times), math.ceil(times)}, name


def test_portions_train_as_one_plan_of_the_same_steps(lengths, digits, tmp_path):
    """Prevents lost steps or other losses at a portion's end or after a resume inside one."""
    options = ("--dp", "2", "--portion-samples", "30", "--epochs", "2")
    portions = plan_digits(lengths, tmp_path / "portions", *options)
    assert "portions of 2 epochs are valid" in succeed("-m", "omnibal", "check", portions)
    files = open_plan(portions)
    packs, every = files.steps
    # Joined portions as a plan from an external packer, with identical steps.
    joined = {
        "method": "other",
        "portions": (),
        "fewest_packs": None,
        "packs_sha256": packs.sha256,
        "steps_sha256": steps_of(packs).sha256,
        "lengths_sha256": every.sha256,
    }
    data = files.plan.data.model_copy(update=joined)
    of_one = {"data": data, "settings_sha256": None, "prediction": None}
    whole = files.plan.model_copy(update=of_one)
    save_plan(PlanResult(plan=whole, data=(packs, every), search=None), tmp_path / "whole")
    expected, save = tmp_path / "run_whole", tmp_path / "run"
    pair_succeeds(*training(tmp_path / "whole", digits, expected))
    stop = files.plan.data.first_steps[2] - 1  # in the second portion
    pair_succeeds(*training(portions, digits, save, "--train-iters", stop))
    fewer = training(portions, digits, save, "--elastic", "--train-iters", stop + 2)
    assert "planned for the 1 processes" in ranks_succeed(1, *fewer)
    pair_succeeds(*training(portions, digits, save, "--elastic"))
    assert len(losses(save)) == files.plan.data.steps
    assert losses(save)[:stop] == pytest.approx(losses(expected)[:stop], rel=1e-6)
    assert losses(save) == pytest.approx(losses(expected), rel=1e-4)
    epochs = [[each["epoch"] for each in records(run)] for run in (save, expected)]
    assert epochs[0] == epochs[1]
    succeed("-m", "omnibal", "report", portions, "--run", save, "-o", tmp_path / "report.html")
