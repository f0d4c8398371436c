"""The commands of scripts/quickstart_omni.sh on a small dataset, and the script's own order."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import REPOSITORY
from end_to_end_cases import pair_succeeds, records, succeed, training

from omnibal import cli
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
    """Prevents: commands of the quickstart of three modalities that do not fit together, or another
    loss where the encoders are data-parallel."""
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


def script_commands(folder: Path, *arguments: str) -> tuple[int, list[list[str]], str]:
    """What the script would start, with stand-ins for all programs; status, commands, errors."""
    programs, log = folder / "bin", folder / "started"
    (folder / "scripts").mkdir(exist_ok=True)
    programs.mkdir(exist_ok=True)
    for script in (SCRIPT, SCRIPT.with_name("quickstart_steps.sh")):
        (folder / "scripts" / script.name).write_text(script.read_text())
    # `refuse` is as environment.sh has it; what makes .venv is left out.
    environment = (REPOSITORY / "scripts" / "environment.sh").read_text()
    refuse = re.search(r"^refuse\(\) \{.*?^\}", environment, re.MULTILINE | re.DOTALL)
    assert refuse is not None
    (folder / "scripts" / "environment.sh").write_text(
        f'cd "$(dirname "${{BASH_SOURCE[0]}}")/.."\n{refuse[0]}\nPATH="{programs}:$PATH"\n'
    )
    if not (interpreter := programs / "stand-in-python").exists():
        interpreter.symlink_to(sys.executable)
    for name in ("python", "omnibal", "torchrun"):
        program = programs / name
        program.write_text(
            # Through env, as the kernel ends an interpreter's path at its first space.
            "#!/usr/bin/env stand-in-python\nimport json, sys, os\n"
            f"print(json.dumps([{name!r}, *sys.argv[1:]]), file=open({str(log)!r}, 'a'))\n"
            "made = [sys.argv[i + 1] for i, w in enumerate(sys.argv) if w in ('--save',)]\n"
            "[os.makedirs(one, exist_ok=True) for one in made]\n"
        )
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(folder / "scripts" / SCRIPT.name), *arguments],
        text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    started = log.read_text().splitlines() if log.exists() else []
    return done.returncode, list(map(json.loads, started)), done.stderr


def test_script_gives_options_that_exist(tmp_path):
    """Prevents: a quickstart that ends in a usage error after minutes."""
    status, commands, errors = script_commands(tmp_path, "beside")
    assert status == 0, errors
    names = [command[1] if command[0] == "omnibal" else command[0] for command in commands]
    assert names == [
        "python", "lengths", "profile", "plan", "check", "torchrun", "torchrun", "report"
    ]  # fmt: skip
    group = typer.main.get_command(cli.app)
    for command in commands:
        if command[0] == "omnibal":
            known = {flag for option in group.commands[command[1]].params for flag in option.opts}
            given = {word for word in command[2:] if re.fullmatch("--?[a-z].*", word)}
            assert given <= known
    assert "beside" in commands[3]
    assert "pipeline" in script_commands(tmp_path, "pipeline")[1][len(commands) + 3]


def test_script_refuses_another_place(tmp_path):
    """Prevents: minutes of work before a word that is none of the two is found."""
    status, commands, errors = script_commands(tmp_path, "nowhere")
    assert status == 2 and not commands
    assert errors.splitlines() == ["error: nowhere: must be pipeline or beside; give one"]
