"""Plans whose ranks divide weights, through the commands as they are typed."""

import json
import os
import signal
from pathlib import Path

import pytest
from commands import launcher
from end_to_end_cases import (
    assert_same_evaluation,
    losses,
    rank_environments,
    ranks_succeed,
    succeed,
    training,
    wait_for_steps,
)


@pytest.fixture(scope="module")
def sharded(single, tmp_path_factory) -> Path:
    """The same steps on four ranks, of which two and two divide the weights."""
    return divided(single, tmp_path_factory.mktemp("plans") / "sharded", 2, "--dp", "4")


def divided(single: Path, folder: Path, sharded: int, *sizes: str) -> Path:
    succeed(
        "-m", "omnibal", "plan", "--model", "internvl-digits", "--cluster", "laptop-cpu",
        "--precision", "fp32", "--steps-of", single, *sizes, "-o", folder,
    )  # fmt: skip
    plan = json.loads((folder / "plan.json").read_text())
    plan["parallel"]["sharded"] = sharded
    plan["prediction"] = None
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_sharded_weights_train_resume_and_answer_as_one_process(single, sharded, digits, tmp_path):
    """Prevents: a plan that the trainer cannot follow."""
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    heldout = ("--eval-data", digits / "heldout" / "meta.json", "--eval-samples", "6")
    held = (*heldout, "--eval-interval", "3", "--max-new-tokens", "2")
    succeed(*training(single, digits, alone, "--train-iters", "3", *held))
    ranks_succeed(4, *training(sharded, digits, apart, "--train-iters", "2"))
    resume = ("--load", apart, "--train-iters", "3")
    succeed(*training(single, digits, tmp_path / "back", *resume))
    said = ranks_succeed(4, *training(sharded, digits, apart, *resume, *held))
    assert f"resuming {apart} after step 2" in said
    assert losses(apart) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(tmp_path / "back") == pytest.approx(losses(alone)[2:], rel=1e-4)
    assert_same_evaluation([apart, alone])


def test_rank_that_dies_ends_all_that_share_its_weights(sharded, digits, tmp_path):
    """Prevents: ranks that wait for ever for the weights of one that is gone."""
    save = tmp_path / "run"
    command = training(sharded, digits, save, "--save-interval", "1000")
    with launcher().start(tuple(command), list(rank_environments(4))) as started:
        wait_for_steps(save, 1)
        os.kill(started.pids[2], signal.SIGKILL)
        ended = started.ended
    assert not any(one.returncode == 0 for one in ended)
    assert any("rank 2 has not been heard of" in one.stderr for one in ended)


def test_stages_of_sharded_weights_go_on_where_one_process_began(single, digits, tmp_path):
    """Prevents: a pipeline of divided weights that only starts anew, or with another loss."""
    staged = divided(single, tmp_path / "staged", 2, "--pp", "2", "--dp", "2")
    first = training(single, digits, tmp_path / "first", "--train-iters", "1")
    succeed(*first)
    resume = ("--load", tmp_path / "first", "--train-iters", "2")
    succeed(*training(single, digits, tmp_path / "alone", *resume))
    ranks_succeed(4, *training(staged, digits, tmp_path / "staged run", *resume))
    assert losses(tmp_path / "staged run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
