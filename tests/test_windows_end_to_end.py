"""Windows of a stream through the commands as they are typed: the loss of the order as read."""

from pathlib import Path

import pytest
from end_to_end_cases import CAPS, MODEL, losses, ranks_succeed, records, succeed, training

PLAN = ("-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32")


def windows(lengths: Path, output: Path, *options: object) -> Path:
    succeed(*PLAN, *CAPS, "--lengths", lengths, "--window", "26", *options, "-o", output)
    return output


def test_dispatched_windows_have_the_loss_of_the_order_as_read(lengths, digits, tmp_path):
    """Prevents: another step, or samples trained twice, where ranks share windows equally."""
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
    seen = {
        name: [(record["samples"], record["tokens"]) for record in records(save)]
        for name, save in saves.items()
    }
    for name, save in saves.items():
        assert seen[name] == seen["as_read"]
        assert losses(save) == pytest.approx(expected, rel=1e-6)
