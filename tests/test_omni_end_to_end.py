"""The commands of scripts/quickstart_omni.sh on a small dataset, and the script's own order."""

import json
from pathlib import Path

import pytest
from commands import REPOSITORY
from end_to_end_cases import pair_succeeds, records, succeed, training
from quickstart_cases import script_commands, unknown_options

from tools.make_spoken_digits import make_dataset

SCRIPT = REPOSITORY / "scripts" / "quickstart_omni.sh"
MODEL = ("--model", "internvl-digits-omni")
CAPS = ("--max-tiles", "8", "--limit", "clips=8", "--max-tokens", "320")
KINDS = {"said", "shown", "same", "said line", "shown line", "arithmetic"}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken") / "dataset"
    make_dataset(folder, samples=60, heldout_samples=25, seed=0)
    return folder


def test_digits_that_are_said_are_scanned_planned_trained_and_asked_for(spoken, tmp_path):
    """Prevents: commands of the quickstart of three modalities that do not fit together."""
    given = ("--tokenizer-model", spoken / "tokenizer.model")
    lengths, runs = tmp_path / "lengths.parquet", {}
    succeed(
        "-m", "omnibal", "lengths", spoken / "train" / "meta.json", *MODEL, *given, "-o", lengths
    )
    for encoder in ("pipeline", "beside"):
        plan, runs[encoder] = tmp_path / encoder, tmp_path / f"run_{encoder}"
        succeed(
            "-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--pp", "2", "--precision",
            "fp32", *CAPS, "--lengths", lengths, "--window", "20", "--encoder", encoder, "-o", plan,
        )  # fmt: skip
        assert "clips" in succeed("-m", "omnibal", "check", plan)
        pair_succeeds(*training(plan, spoken, runs[encoder], "--train-iters", "2"))
    # Windows are the same steps wherever the encoders are.
    losses = {name: [r["loss"] for r in records(run)] for name, run in runs.items()}
    assert losses["beside"] == pytest.approx(losses["pipeline"], rel=1e-5)
    pair_succeeds(
        "pretrain_vlm.py", "--plan", tmp_path / "pipeline", *given, "--skip-train",
        "--load", runs["pipeline"], "--save", runs["pipeline"],
        "--eval-data", spoken / "heldout" / "meta.json", "--max-new-tokens", "2",
    )  # fmt: skip
    evaluation = json.loads((runs["pipeline"] / "evaluation.json").read_text())
    assert {kind["kind"] for kind in evaluation["kinds"]} == KINDS


def test_script_gives_options_that_exist(tmp_path):
    """Prevents: a quickstart that ends in a usage error after minutes."""
    status, commands, errors = script_commands(SCRIPT, tmp_path, "beside")
    assert status == 0, errors
    names = [command[1] if command[0] == "omnibal" else command[0] for command in commands]
    assert names == [
        "python", "lengths", "profile", "plan", "check", "torchrun", "torchrun", "report"
    ]  # fmt: skip
    assert unknown_options(commands) == set()
    assert "beside" in commands[3]
    assert "pipeline" in script_commands(SCRIPT, tmp_path, "pipeline")[1][len(commands) + 3]


def test_script_refuses_another_place(tmp_path):
    """Prevents: minutes of work before a word that is none of the two is found."""
    status, commands, errors = script_commands(SCRIPT, tmp_path, "nowhere")
    assert status == 2 and not commands
    assert errors.splitlines() == ["error: nowhere: must be pipeline or beside; give one"]
