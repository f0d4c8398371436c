"""End-to-end runs of the user's commands on the digits dataset, from images to a report."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY
from end_to_end_cases import (
    CAPS,
    PLAN,
    TORCHRUN,
    forked_steps,
    losses,
    pair_succeeds,
    plan_digits,
    ranks_start,
    records,
    refuse,
    run_ranks,
    succeed,
    training,
    wait_for_steps,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omnibal import cli
from omnibal.base.folder_lock import lock_folder


@pytest.fixture(scope="module")
def plan(lengths, tmp_path_factory) -> Path:
    return plan_digits(lengths, tmp_path_factory.mktemp("plans") / "plan", "--pp", "2")


@pytest.fixture(scope="module")
def long_plan(lengths, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plans") / "long"
    return plan_digits(lengths, folder, "--pp", "2", "--epochs", "4")


@pytest.fixture(scope="module")
def short_run(single, digits, tmp_path_factory) -> Path:
    """Read-only run of one step on one process."""
    save = tmp_path_factory.mktemp("runs") / "begun"
    succeed(*training(single, digits, save, "--train-iters", "1"))
    return save


def test_two_ranks_under_torchrun_equal_one_process(plan, single, digits, tmp_path):
    """Prevents losses that differ between PP 2 and one process, and a failing report or replay."""
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    succeed(*TORCHRUN, *training(plan, digits, pair, "--train-iters", "2"))
    evaluate = ("--eval-data", digits / "heldout" / "meta.json", "--max-new-tokens", "3")
    resume = ("--load", pair, "--train-iters", "3", *evaluate)
    output = pair_succeeds(*training(plan, digits, pair, *resume))
    assert f"resuming {pair} after step 2" in output
    succeed(*training(single, digits, alone, "--train-iters", "3"))
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-4)
    evaluation = json.loads((pair / "evaluation.json").read_text())
    assert evaluation["step"] == 3 and len(evaluation["examples"]) >= 16
    page = tmp_path / "report.html"
    report = ("-m", "omnibal", "report", plan, "--run", pair, "-o", page, "--json")
    result = json.loads(succeed(*report))
    found = [result["run"][name] for name in ("first_loss", "last_loss")]
    assert found == [losses(pair)[0], losses(pair)[-1]]
    assert result["run"]["provider"] == "local"
    assert result["accuracy"].keys() == {kind["kind"] for kind in evaluation["kinds"]}
    assert "</html>" in page.read_text()
    replay, data = tmp_path / "replay", digits / "train" / "meta.json"
    given = ("--data", data, "--tokenizer-model", digits / "tokenizer.model", "-o", replay)
    steps = ("--steps", "1", "--repetitions", "1")
    assert "idle" in pair_succeeds("tools/replay.py", plan, *given, *steps)
    result = json.loads(succeed(*report, "--replay", replay))
    assert result["replay"]["provider"] == "local"
    assert result["replay"]["step_ms"] > 0 and result["run"]["step_ms"] > 0
    assert "replayed" in page.read_text()


def test_replay_says_what_is_wrong(plan, digits, tmp_path):
    """Prevents tracebacks and partial replays after wrong stages or data."""
    command = ("tools/replay.py", plan, "-o", tmp_path / "replay")
    for stages in ("0,2", ""):
        assert "from 0 to 1" in refuse(*command, "--stages", stages)
    other = ("--data", digits / "heldout" / "meta.json")
    given = ("--tokenizer-model", digits / "tokenizer.model")
    assert "the plan was made for other data" in refuse(*command, *other, *given)
    assert not (tmp_path / "replay").exists()
    output = succeed(*command, "--stages", "1", "--steps", "1", "--repetitions", "1")
    assert "Replayed stages" in output


def test_run_of_other_steps_is_not_resumed(short_run, lengths, digits, tmp_path):
    """Prevents resuming with a plan that assigns other samples to the steps."""
    other = plan_digits(lengths, tmp_path / "other", "--seed", "1")
    message = refuse(*training(other, digits, short_run, "--load", short_run))
    assert "was trained on other steps than the plan's" in message and "--steps-of" in message


def test_plans_that_cannot_be_started_are_refused(plan, digits, tmp_path):
    """Prevents ranks that hang on a wrong world size, and training of a plan without data."""
    succeed(*PLAN, *CAPS, "-o", tmp_path / "shapes")
    message = refuse(*training(tmp_path / "shapes", digits, tmp_path / "run"))
    assert "no data, so it cannot be trained" in message
    for processes in (1, 3):
        message = refuse(*training(plan, digits, tmp_path / "run"), processes=processes)
        assert f"launched with {processes} process(es)" in message
        assert "TP 1 x PP 2 x DP 1 = 2" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (("--train-iters", "0"), "argument --train-iters: must be an integer >= 1, got '0'"),
        (("--lr-warmup-fraction", "1.5"), "argument --lr-warmup-fraction"),
        (("--no-such-option",), "unrecognized arguments: --no-such-option"),
        (("--seed", "9" * 20), "an integer >= 0 and < 2^63, got '99999999999999999999'"),
        (("--profile-steps", "3-"), "must be a step or a range such as 5-7, got '3-'"),
        (("--profile-steps", "900"), "step 900 was given, and the run ends with step"),
    ],
)
def test_wrong_options_are_refused(single, digits, tmp_path, option, complaint):
    """Prevents wrong options that are ignored, or that end in a traceback on every rank."""
    assert complaint in refuse(*training(single, digits, tmp_path / "run", *option))
    assert not (tmp_path / "run").exists()


def test_run_is_not_overwritten(short_run, single, digits, tmp_path):
    """Prevents a second start that overwrites a trained run or mixes two runs in a log."""
    before, other = (short_run / "run.jsonl").read_bytes(), tmp_path / "other"
    assert "resume it with --load" in refuse(*training(single, digits, short_run))
    succeed(*training(single, digits, other, "--load", short_run, "--train-iters", "2"))
    assert len(losses(other)) == 1
    message = refuse(*training(single, digits, short_run, "--load", other))
    assert "holds a run of 1 steps" in message
    assert (short_run / "run.jsonl").read_bytes() == before


def test_one_run_writes_to_a_folder(single, digits, tmp_path):
    """Prevents concurrent runs in one folder, and a late error for an unwritable folder."""
    with lock_folder("--save", tmp_path / "run", print):
        message = refuse(*training(single, digits, tmp_path / "run"))
        assert (
            f"run: in use by process {os.getpid()} on " in message and "another --save" in message
        )
    (tmp_path / "file").touch()
    message = refuse(*training(single, digits, tmp_path / "file" / "run"))
    assert "give a writable directory" in message


def test_reports_of_a_run(long_plan, digits, tmp_path):
    """Prevents options of validation, traces, checkpoints and TensorBoard that have no effect."""
    save, board = tmp_path / "run", tmp_path / "board"
    options = (
        "--train-iters", "4", "--save-interval", "1", "--keep-checkpoints", "2", "--eval-data",
        digits / "heldout" / "meta.json", "--eval-samples", "12", "--eval-interval", "2",
        "--max-new-tokens", "1", "--profile-steps", "1-2", "--tensorboard-dir", board,
        "--loss-weighting", "sqrt", "--drop-path-rate", "0.2",
    )  # fmt: skip
    output = pair_succeeds(*training(long_plan, digits, save, *options))
    lines = (save / "validation.jsonl").read_text().splitlines()
    validations = [json.loads(line) for line in lines]
    assert [validation["step"] for validation in validations] == [2, 4]
    assert validations[1]["loss"] < validations[0]["loss"]
    assert "validation after step 2: loss" in output and "samples/s" in output
    assert {path.name for path in save.glob("iter_*")} == {"iter_0000003", "iter_0000004"}
    for stage in range(2):
        trace = json.loads((save / "traces" / f"stage_{stage}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "aten::mm" in names or "aten::addmm" in names
    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(save))
    assert len(events.Scalars("validation/loss")) == 2
    assert all(0 < record["mfu"] < 1.5 and not record["skipped"] for record in records(save))


def test_preempted_run_saves_ends_with_0_and_goes_on(long_plan, digits, tmp_path):
    """Prevents steps lost after SIGTERM to one rank, and a nonzero status after preemption."""
    whole, save = tmp_path / "whole", tmp_path / "run"
    pair_succeeds(*training(long_plan, digits, whole))
    with ranks_start(2, *training(long_plan, digits, save)) as ranks:
        wait_for_steps(save, 1)
        os.kill(ranks.pids[1], signal.SIGTERM)
    assert [rank.returncode for rank in ranks.ended] == [0, 0], ranks.ended
    stopped = len(records(save))
    assert 0 < stopped < len(records(whole))
    assert f"stopped as asked after step {stopped}" in ranks.ended[0].stdout
    assert f"--load {save}" in ranks.ended[0].stdout
    stale = records(save)[-1] | {"step": stopped, "loss": 99.0}
    with (save / "run.jsonl").open("a") as log:  # a step trained after the last checkpoint
        log.write(json.dumps(stale) + "\n")
    output = pair_succeeds(*training(long_plan, digits, save, "--load", save))
    assert f"resuming {save} after step {stopped}" in output
    assert losses(save) == losses(whole)


def test_killed_rank_ends_the_others_with_its_name(long_plan, digits, tmp_path):
    """Prevents a job that holds its devices for hours after a rank was killed."""
    save = tmp_path / "run"
    with ranks_start(2, *training(long_plan, digits, save)) as ranks:
        wait_for_steps(save, 1)
        os.kill(ranks.pids[1], signal.SIGKILL)
        survivor, _ = ranks.ended
    assert survivor.returncode == 1
    assert "rank 1 has not been heard of" in survivor.stderr


def test_broken_image_is_passed_over_when_asked_to(plan, single, digits, tmp_path):
    """Prevents a broken image from ending a run, and stages that replace it differently."""
    copy = shutil.copytree(digits, tmp_path / "digits")
    for image in sorted((copy / "train" / "images").iterdir())[::5]:
        image.write_bytes(image.read_bytes()[:60])
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    options = ("--train-iters", "3", "--on-bad-sample", "skip")
    result = run_ranks(2, *training(plan, copy, pair, *options))
    assert result.returncode == 0, result.stderr
    replaced = sum(record["replaced_samples"] for record in records(pair))
    assert replaced == result.stderr.count("passed over: ") > 0
    succeed(*training(single, copy, alone, *options))
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-4)


def test_projector_is_trained_first_and_then_the_rest(lengths, single, digits, tmp_path):
    """Prevents a second phase that starts from random weights or continues the first's steps."""
    first, second = tmp_path / "first", tmp_path / "second"
    frozen = ("--freeze", "vision", "--freeze", "language", "--pp", "2")
    plan = plan_digits(lengths, tmp_path / "plan", *frozen)
    pair_succeeds(*training(plan, digits, first, "--train-iters", "2"))
    message = refuse(*training(single, digits, first, "--load", first, "--finetune"))
    assert "holds a run of 2 steps" in message
    message = refuse(*training(single, digits, tmp_path / "third", "--load", first))
    assert "frozen is ['vision', 'language'] there and [] given" in message
    whole = training(single, digits, second, "--load", first, "--finetune", "--train-iters", "2")
    assert f"starting from the weights of {first} after step 2" in succeed(*whole)
    assert [record["step"] for record in records(second)] == [0, 1]
    assert losses(second)[0] < losses(first)[0]


def test_a_run_fine_tunes_a_released_checkpoint(short_run, digits, tmp_path, monkeypatch):
    """Prevents fine-tuning from random weights, incomplete exports, and a job that neither resumes
    after a stop nor restarts after its data changed."""
    released, job, convert = tmp_path / "released", tmp_path / "job", "tools/convert.py"
    given = ("--layout", "transformers", "--tokenizer-model", digits / "tokenizer.model")
    succeed(convert, "export", short_run, *given, "--max-shard-size", "1MB", "-o", released)
    annotations = shutil.copytree(digits / "train", tmp_path / "train") / "digits_single.jsonl"
    meta = annotations.with_name("meta.json")
    meta.write_text(re.sub(r'"length": \d+', '"repeat_time": 1', meta.read_text()))
    said = forked_steps(monkeypatch)
    command = ["run", "--model", released, "--data", meta, "--cluster", "laptop-cpu", "--gpus", "2"]
    command += ["--samples-per-step", "36", "--pp", "2", "-o", job, "--lr", "1e-4", "--"]

    def fine_tune(*more: str) -> str:
        said.clear()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in (*command, "--num-workers", "0", *more)])
        assert not ended.value.code, said
        return "".join(said)

    assert f"starting from the weights of {job / 'weights'}" in fine_tune("--train-iters", "1")
    assert f"resuming {job / 'run'} after step 1" in fine_tune()
    mine = {path.name for path in (job / "hf").iterdir()}
    assert mine == {path.name for path in released.iterdir()} > {"config.json", "tokenizer.model"}
    annotations.write_text(annotations.read_text().partition("\n")[2])
    assert f"starting from the weights of {job / 'weights'}" in fine_tune()
    kept = {"hf-1", "hf-2", "run-1"}
    assert kept < {path.name for path in job.iterdir()}
    imported = job / "weights"
    image = digits / "heldout" / "images" / "digits_single-00000-0.png"
    chat = ("tools/chat.py", "--load", imported, "--image", image, "--prompt", "Which digit?")
    subprocess.run([sys.executable, *chat], cwd=REPOSITORY, check=True)  # in a fresh Python
