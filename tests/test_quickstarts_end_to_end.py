"""Quickstart commands on small datasets, and the commands that quickstart scripts start."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import REPOSITORY
from end_to_end_cases import PLANNER, losses, pair_succeeds, ranks_succeed, succeed, training

from megatron.vlm.conversion.importing import open_released
from omnibal import cli
from omnibal.model.config import load_model
from tools import make_native_digits, make_spoken_digits

OMNI, QWEN = ("--model", "internvl-digits-omni"), ("--model", "qwen3-vl-digits")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("spoken") / "dataset"
    make_spoken_digits.make_dataset(folder, samples=60, heldout_samples=25, seed=0)
    return folder


def test_digits_that_are_said_are_scanned_planned_trained_and_asked_for(spoken, tmp_path):
    """Prevents a quickstart command for image, audio and text that fails on its input."""
    tokenizer_args = ("--tokenizer-model", spoken / "tokenizer.model")
    lengths, data, runs = tmp_path / "lengths.parquet", spoken / "train" / "meta.json", {}
    succeed("-m", "omnibal", "lengths", data, *OMNI, *tokenizer_args, "-o", lengths)
    for encoder in ("pipeline", "data-parallel"):
        plan, runs[encoder] = tmp_path / encoder, tmp_path / f"run_{encoder}"
        options = ("--pp", "2", "--lengths", lengths, "--window", "20", "--encoder", encoder)
        caps = ("--max-tiles", "8", "--limit", "clips=8", "--max-tokens", "320")
        succeed(*PLANNER, *OMNI, *caps, *options, "-o", plan)
        assert "clips" in succeed("-m", "omnibal", "check", plan)
        pair_succeeds(*training(plan, spoken, runs[encoder], "--train-iters", "2"))
    # Windows have identical steps for both encoder placements.
    assert losses(runs["data-parallel"]) == pytest.approx(losses(runs["pipeline"]), rel=1e-5)
    pair_succeeds(
        "pretrain_vlm.py", "--plan", tmp_path / "pipeline", *tokenizer_args, "--skip-train",
        "--load", runs["pipeline"], "--save", runs["pipeline"],
        "--eval-data", spoken / "heldout" / "meta.json", "--max-new-tokens", "2",
    )  # fmt: skip
    evaluation = json.loads((runs["pipeline"] / "evaluation.json").read_text())
    kinds = {"said", "shown", "same", "said line", "shown line", "arithmetic"}
    assert {kind["kind"] for kind in evaluation["kinds"]} == kinds


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native") / "dataset"
    make_native_digits.make_dataset(folder, samples=60, heldout_samples=12, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer_args(native) -> tuple[object, ...]:
    """Tokenizer options."""
    return "--tokenizer-model", native / "tokenizer"


@pytest.fixture(scope="module")
def planner(native, tokenizer_args, tmp_path_factory) -> tuple[object, ...]:
    """Planning command for the scanned dataset."""
    lengths, data = tmp_path_factory.mktemp("lengths") / "l.parquet", native / "train" / "meta.json"
    succeed("-m", "omnibal", "lengths", data, *QWEN, *tokenizer_args, "-o", lengths)
    caps = ("--limit", "image_tokens=160", "--max-tokens", "320", "--epochs", "1")
    return *PLANNER, *QWEN, *caps, "--lengths", lengths


@pytest.fixture(scope="module")
def eval_args(native) -> tuple[object, ...]:
    return "--eval-data", native / "heldout" / "meta.json", "--max-new-tokens", "2"


def test_images_of_many_sizes_are_scanned_planned_trained_asked_about_and_exported(
    native, tokenizer_args, planner, eval_args, tmp_path
):
    """Prevents a command of the Qwen quickstart that fails on its input, or a wrong export."""
    plan, run, out = tmp_path / "plan", tmp_path / "run", tmp_path / "exported"
    succeed(*planner, "--pp", "2", "--micro-batches", "3", "-o", plan)
    assert "image_tokens" in succeed("-m", "omnibal", "check", plan)
    pair_succeeds(*training(plan, native, run, "--train-iters", "2", *tokenizer_args))
    assert len(losses(run)) == 2
    again = ("--plan", plan, *tokenizer_args, "--load", run, "--save", run)
    pair_succeeds("pretrain_vlm.py", "--skip-train", *again, *eval_args)
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {"single", "position", "arithmetic"} <= {kind["kind"] for kind in evaluation["kinds"]}
    succeed("tools/convert.py", "export", run, "--layout", "qwen3-vl", *tokenizer_args, "-o", out)
    config = json.loads((out / "config.json").read_text())
    assert (config["image_token_id"], config["vision_start_token_id"]) == (5, 3)
    assert open_released(out).model.language.kinds == load_model(QWEN[1]).language.kinds
    assert {"chat_template.jinja", "preprocessor_config.json"} <= {p.name for p in out.iterdir()}


def test_encoders_train_and_answer_alike_in_either_placement(
    native, tokenizer_args, planner, eval_args, tmp_path
):
    """Prevents losses or answers that differ between data-parallel and pipeline encoders."""
    single, several = tmp_path / "single", tmp_path / "several"
    succeed(*planner, "--packing-levels", "1", "--samples-per-step", "20", "-o", single)
    sizes = ("--pp", "2", "--dp", "2", "--encoder", "data-parallel")
    succeed(*PLANNER, *QWEN, "--steps-of", single, *sizes, "-o", several)
    plan = json.loads((several / "plan.json").read_text())
    changes = {"sharded": 4, "items_per_pass": {"vision": 60}, "kept_items": {"vision": 90}}
    plan["data_parallel_encoders"] |= changes
    (several / "plan.json").write_text(json.dumps(plan))
    found = []
    for folder, ranks in ((single, 1), (several, 4)):
        save = tmp_path / f"run-{folder.name}"
        ranks_succeed(
            ranks,
            *training(folder, native, save, "--train-iters", "2", *tokenizer_args, *eval_args),
        )
        evaluation = json.loads((save / "evaluation.json").read_text())
        found.append((losses(save), evaluation["kinds"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == found[0][1]


def script_commands(name: str, folder: Path, *arguments: str) -> tuple[int, list[list], str]:
    """Run a script with fake programs; return its status, the commands and its errors."""
    programs, scripts, log = folder / "bin", folder / "scripts", folder / "started"
    for made in (programs, scripts):
        made.mkdir(parents=True)
    for script in (f"{name}.sh", "quickstart_steps.sh"):
        (scripts / script).write_text((REPOSITORY / "scripts" / script).read_text())
    # Keep environment.sh's `refuse`, drop the set-up of .venv.
    environment = (REPOSITORY / "scripts" / "environment.sh").read_text()
    refuse = re.search(r"^refuse\(\) \{.*?^\}", environment, re.MULTILINE | re.DOTALL)
    assert refuse is not None
    (scripts / "environment.sh").write_text(
        f'cd "$(dirname "${{BASH_SOURCE[0]}}")/.."\n{refuse[0]}\nPATH="{programs}:$PATH"\n'
    )
    (programs / "stand-in-python").symlink_to(sys.executable)
    for word in ("python", "omnibal", "torchrun"):
        program = programs / word
        program.write_text(
            # Through env: a shebang path may not have a space.
            "#!/usr/bin/env stand-in-python\nimport json, sys, os\n"
            f"print(json.dumps([{word!r}, *sys.argv[1:]]), file=open({str(log)!r}, 'a'))\n"
            "made = [sys.argv[i + 1] for i, w in enumerate(sys.argv) if w in ('--save',)]\n"
            "[os.makedirs(one, exist_ok=True) for one in made]\n"
        )
        program.chmod(0o755)
    command = ["bash", str(scripts / f"{name}.sh"), *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600)
    started = log.read_text().splitlines() if log.exists() else []
    return done.returncode, list(map(json.loads, started)), done.stderr


TRAINED = "python lengths profile plan check torchrun torchrun"


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("quickstart", "python python report"),
        ("quickstart_omni", "report"),
        ("quickstart_qwen", "python report python lengths plan torchrun torchrun python"),
    ],
)
def test_script_gives_options_that_exist(tmp_path, script, names):
    """Prevents a quickstart that passes an unknown option minutes after its start."""
    status, commands, errors = script_commands(script, tmp_path / "all")
    assert status == 0, errors
    assert [one[one[0] == "omnibal"] for one in commands] == f"{TRAINED} {names}".split()
    group = typer.main.get_command(cli.app)
    for program, name, *words in commands:
        if program == "omnibal":
            known = {flag for option in group.commands[name].params for flag in option.opts}
            assert {word for word in words if re.fullmatch("--?[a-z].*", word)} <= known


def test_quickstart_trains_a_run_of_its_own_for_a_seed(tmp_path):
    """Prevents an ignored seed, and runs of two seeds in one directory."""
    status, commands, errors = script_commands("quickstart", tmp_path / "all", "7")
    assert status == 0, errors
    [trained, _] = [one for one in commands if one[0] == "torchrun"]
    assert trained[trained.index("--save") + 1] == "work/quickstart/run_7"
    assert trained[-2:] == ["--seed", "7"]
    status, commands, errors = script_commands("quickstart", tmp_path / "no", "seven")
    assert (status, commands) == (2, [])
    assert errors == "error: seven: a seed must be a whole number; give one, or none\n"


def test_omni_script_takes_the_place_of_the_encoders(tmp_path):
    """Prevents minutes of work before an unknown encoder placement is refused."""
    status, commands, errors = script_commands("quickstart_omni", tmp_path / "no", "nowhere")
    assert status == 2 and not commands
    assert errors.splitlines() == ["error: nowhere: must be pipeline or data-parallel"]
    for place in ("data-parallel", "pipeline"):
        _, commands, _ = script_commands("quickstart_omni", tmp_path / place, place)
        assert commands[3][:2] == ["omnibal", "plan"] and place in commands[3]
