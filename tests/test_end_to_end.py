"""The user's commands, as they are typed, on a small dataset: from images to a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
MODEL = ("--model", "internvl-digits")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CAPS = ("--max-tiles", "12", "--max-tokens", "400")


def run(*command: object, processes: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes is not None:  # stands for a launcher: one rank of so many
        environment |= {"RANK": "0", "WORLD_SIZE": str(processes)}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=300,
    )  # fmt: skip


def succeed(*command: object) -> str:
    result = run(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refuse(*command: object, processes: int | None = None) -> str:
    """The one line of a user's mistake."""
    result = run(*command, processes=processes)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    return lines[0]


@pytest.fixture(scope="module")
def lengths(digits, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    meta, tokenizer = digits / "train" / "meta.json", digits / "tokenizer.model"
    succeed("-m", "omnibal", "lengths", meta, *MODEL, "--tokenizer-model", tokenizer, "-o", path)
    return path


def plan_of(lengths: Path, output: Path, *options: str) -> Path:
    succeed(
        "-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32", *CAPS,
        "--lengths", lengths, "--micro-batches", "4", *options, "-o", output,
    )  # fmt: skip
    return output


@pytest.fixture(scope="module")
def plan(lengths, tmp_path_factory) -> Path:
    return plan_of(lengths, tmp_path_factory.mktemp("plans") / "plan", "--pp", "2")


@pytest.fixture(scope="module")
def single_plan(lengths, tmp_path_factory) -> Path:
    return plan_of(lengths, tmp_path_factory.mktemp("plans") / "single")


def training(plan: Path, digits: Path, save: Path, *options: object) -> list[object]:
    return [
        "pretrain_vlm.py", "--plan", plan, "--data", digits / "train" / "meta.json",
        "--tokenizer-model", digits / "tokenizer.model", "--save", save, "--lr", "1e-3",
        "--num-workers", "1", *options,
    ]  # fmt: skip


def records(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "run.jsonl").read_text().splitlines()]


def losses(save: Path) -> list[float]:
    return [record["loss"] for record in records(save)]


def test_two_ranks_under_torchrun_equal_one_process(plan, single_plan, digits, lengths, tmp_path):
    """Prevents: commands of the README that do not fit together.

    Trains two steps under torchrun, resumes, evaluates, reports; then the same in one process.
    """
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    succeed(*TORCHRUN, *training(plan, digits, pair, "--train-iters", "2"))
    evaluate = ("--eval-data", digits / "heldout" / "meta.json", "--max-new-tokens", "3")
    output = succeed(
        *TORCHRUN, *training(plan, digits, pair, "--load", pair, "--train-iters", "3", *evaluate)
    )
    assert f"resuming {pair} after step 2" in output
    succeed(*training(single_plan, digits, alone, "--train-iters", "3"))
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-4)
    evaluation = json.loads((pair / "evaluation.json").read_text())
    assert evaluation["step"] == 3 and len(evaluation["examples"]) >= 16
    page = tmp_path / "report.html"
    report = ("-m", "omnibal", "report", plan, "--run", pair, "-o", page, "--json")
    result = json.loads(succeed(*report))
    assert (result["run"]["first_loss"], result["run"]["last_loss"]) == (
        losses(pair)[0], losses(pair)[-1],
    )  # fmt: skip
    assert result["accuracy"].keys() == {kind["kind"] for kind in evaluation["kinds"]}
    assert "</html>" in page.read_text()


def test_run_goes_on_with_other_data_parallel_ranks(single_plan, digits, tmp_path):
    """Prevents: samples that are skipped or trained twice when the number of ranks changes.

    Two steps on one rank, two more on two ranks; against four steps on one rank.
    """
    alone, elastic, wider = tmp_path / "alone", tmp_path / "elastic", tmp_path / "wider"
    plan = ("-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32")
    succeed(*plan, "--dp", "2", "--steps-of", single_plan, "-o", wider)
    succeed(*training(single_plan, digits, alone, "--train-iters", "4"))
    succeed(*training(single_plan, digits, elastic, "--train-iters", "2"))
    resume = training(wider, digits, elastic, "--load", elastic, "--train-iters", "4")
    assert f"resuming {elastic} after step 2" in succeed(*TORCHRUN, *resume)
    assert losses(elastic) == pytest.approx(losses(alone), rel=1e-4)
    seen = [[(r["samples"], r["tokens"]) for r in records(save)] for save in (elastic, alone)]
    assert seen[0] == seen[1]


def test_run_of_other_steps_is_not_resumed(single_plan, lengths, digits, tmp_path):
    """Prevents: a step count that means other samples in the plan than in the checkpoint."""
    save = tmp_path / "run"
    succeed(*training(single_plan, digits, save, "--train-iters", "1"))
    other = plan_of(lengths, tmp_path / "other", "--seed", "1")
    message = refuse(*training(other, digits, save, "--load", save))
    assert "was trained on other steps than the plan's" in message and "--steps-of" in message


def test_launch_of_another_size_is_refused(plan, digits, tmp_path):
    """Prevents: ranks that wait for others that were never started."""
    command = training(plan, digits, tmp_path / "run")
    for processes in (1, 3):
        message = refuse(*command, processes=processes)
        assert f"launched with {processes} process(es)" in message
        assert "tensor 1 x pipeline 2 x data 1 = 2" in message
    assert not (tmp_path / "run").exists()


def test_plan_that_can_only_be_studied_is_refused(digits, tmp_path):
    """Prevents: a trainer that starts on a plan of which `omnibal check` says it cannot train."""
    succeed(
        "-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--precision", "fp32", *CAPS,
        "--tp", "2", "-o", tmp_path / "plan",
    )  # fmt: skip
    message = refuse(*training(tmp_path / "plan", digits, tmp_path / "run"), processes=2)
    assert "without data: it cannot be trained" in message
    assert "tensor size 2 can be studied but not yet trained" in message
    assert not (tmp_path / "run").exists()


def test_plan_of_other_data_is_refused(single_plan, digits, tmp_path):
    """Prevents: training on samples that the plan's packs do not describe."""
    command = training(single_plan, digits, tmp_path / "run")
    other = [digits / "heldout" / "meta.json" if "train" in str(c) else c for c in command[4:5]]
    message = refuse(*command[:4], *other, *command[5:])
    assert "the plan was made for other data" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (("--train-iters", "0"), "argument --train-iters: invalid positive value: '0'"),
        (("--lr-warmup-fraction", "1.5"), "argument --lr-warmup-fraction"),
        (("--min-lr", "1"), "--min-lr 1.0 must be from 0 to --lr 0.001"),
        (("--no-such-option",), "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_options_are_refused(single_plan, digits, tmp_path, option, complaint):
    """Prevents: a default in place of what was asked for, or a traceback on every rank."""
    assert complaint in refuse(*training(single_plan, digits, tmp_path / "run", *option))
    assert not (tmp_path / "run").exists()


def test_image_that_broke_after_planning_stops_with_its_path(single_plan, digits, tmp_path):
    """Prevents: a crash deep in a loader process, or a batch without the image."""
    copy = tmp_path / "digits"
    subprocess.run(["cp", "-r", digits, copy], check=True)
    for image in (copy / "train" / "images").iterdir():
        image.write_bytes(image.read_bytes()[:60])
    message = refuse(*training(single_plan, copy, tmp_path / "run", "--train-iters", "1"))
    assert "cannot read this image" in message and ".png" in message and "line" in message
    assert not (tmp_path / "run" / "latest_checkpointed_iteration.txt").exists()


def test_broken_image_stops_both_ranks_with_one_error(plan, digits, tmp_path):
    """Prevents: a rank that waits for the one that failed, or an error for every stage."""
    copy = tmp_path / "digits"
    subprocess.run(["cp", "-r", digits, copy], check=True)
    for image in (copy / "train" / "images").iterdir():
        image.write_bytes(image.read_bytes()[:60])
    result = run(*TORCHRUN, *training(plan, copy, tmp_path / "run", "--train-iters", "1"))
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "cannot read this image" in errors[0], result.stderr


def test_run_is_not_overwritten(single_plan, digits, tmp_path):
    """Prevents: a second start that throws a trained run away, or mixes two runs in one log."""
    save = tmp_path / "run"
    succeed(*training(single_plan, digits, save, "--train-iters", "1"))
    before = (save / "run.jsonl").read_bytes()
    assert "resume it with --load" in refuse(*training(single_plan, digits, save))
    other = tmp_path / "other"
    succeed(*training(single_plan, digits, other, "--load", save, "--train-iters", "2"))
    assert len(losses(other)) == 1
    message = refuse(*training(single_plan, digits, save, "--load", other))
    assert "holds a run of 1 steps" in message
    assert (save / "run.jsonl").read_bytes() == before


def test_checkpoint_of_another_model_is_refused(single_plan, lengths, digits, tmp_path):
    """Prevents: weights that half fit."""
    save = tmp_path / "run"
    succeed(*training(single_plan, digits, save, "--train-iters", "1"))
    preset = REPOSITORY / "omnibal" / "presets" / "models" / "internvl-digits.toml"
    deeper = tmp_path / "deeper.toml"
    deeper.write_text(preset.read_text().replace("layers = 4", "layers = 5"))
    succeed(
        "-m", "omnibal", "plan", "--model", deeper, "--cluster", "laptop-cpu", "--precision",
        "fp32", *CAPS, "--lengths", lengths, "-o", tmp_path / "plan",
    )  # fmt: skip
    other = tmp_path / "other"
    message = refuse(*training(tmp_path / "plan", digits, other, "--load", save))
    assert "is a checkpoint of another model" in message
    assert "vision.layers is 4 there and 5 in the plan" in message
