"""Mixtures of sources through the commands as they are typed."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from end_to_end_cases import (
    MODEL,
    losses,
    pair_succeeds,
    plan_of,
    ranks_succeed,
    records,
    succeed,
    training,
)

from omnibal.data.lengths import read_lengths
from omnibal.job.plan import read_plan
from omnibal.job.plan_files import data_in_portions
from omnibal.job.runlog import samples_digest

EPOCHS = (Fraction(5, 2), Fraction(1), Fraction(1, 2))
"""Of the sources in turn."""


def test_a_mixture_is_trained_as_often_as_its_plan_says(lengths, digits, tmp_path):
    """Prevents: repeats that are lost or doubled by ranks, by portions."""
    every = read_lengths([lengths])
    names = every.source_names
    epochs = {name: EPOCHS[place % len(EPOCHS)] for place, name in enumerate(names)}
    rules = [f"[sources.{name}]\nepochs = {float(times)}\n" for name, times in epochs.items()]
    (tmp_path / "mixture.toml").write_text("".join(rules))
    options = ("--dp", "2", "--portion-samples", "60", "--mixture", tmp_path / "mixture.toml")
    two = plan_of(lengths, tmp_path / "two", *options)
    planner = ("-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32")
    succeed(*planner, "--steps-of", two, "-o", tmp_path / "one")
    ranks_succeed(1, *training(tmp_path / "one", digits, tmp_path / "run_one"))
    data = read_plan(two).data
    save = tmp_path / "run"
    pair_succeeds(*training(two, digits, save, "--train-iters", data.first_steps[1] + 1))
    pair_succeeds(*training(two, digits, save, "--load", save))
    assert losses(save) == pytest.approx(losses(tmp_path / "run_one"), rel=1e-4)
    trained = Counter[int]()
    logged = {record["step"]: record["samples_sha256"] for record in records(save)}
    for packs, own in data_in_portions(data, two):
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
