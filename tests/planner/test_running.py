"""Steps of `omnibal run`: done once, repeated after a change, and resumed after a stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnibal.base.errors import UserError
from omnibal.cli.run_steps import RunStep, Training, choose_weights, find_tokenizer, run_steps
from omnibal.job.runlog import TRACKER_FILE

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
COUNT = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(); print(sys.argv[2:])"
TRAIN = (
    "import pathlib, sys; run = pathlib.Path(sys.argv[1]); run.mkdir(exist_ok=True); "
    "newest = run / 'latest_checkpointed_iteration.txt'; "
    "newest.write_text(str(int(newest.read_text()) + 1 if newest.exists() else 1))"
)


def make(output: Path, read: Path, more: tuple[str, ...] = (), media: tuple[Path, ...] = ()):
    """Return a step that makes a folder, which it may not replace."""
    words = ("python", "-c", COUNT, str(output / "made"), *more)
    return RunStep(words=words, reads=(read,), media=media, makes=output / "made")


@pytest.fixture
def do(tmp_path):
    """Return a function that runs steps and returns the lines printed, without the commands."""

    def do(*steps: RunStep) -> list[str]:
        said: list[str] = []
        assert run_steps(steps, tmp_path / "steps.json", said.append) == 0
        return ["ran" if line[0] == "$" and line[-6:] != "(done)" else line for line in said]

    return do


def test_a_step_is_done_again_after_any_change_alone(do, tmp_path):
    """Prevents results of outdated files, repeated work, and a lost folder."""
    read, media = tmp_path / "data.jsonl", tmp_path / "images"
    read.write_text("one")
    (media / "deep").mkdir(parents=True)
    (media / "deep" / "a.PNG").write_bytes(b"1")
    step = make(tmp_path, read, media=(media,))
    assert do(step) == ["ran"]
    # Files that a run writes next to its data are no input.
    (media / "lengths.parquet").write_text("no medium")
    assert do(step) == [f"$ {step.text}  (done)"]
    kept = [f"{tmp_path / 'made'} is kept as {tmp_path / f'made-{number}'}" for number in (1, 2, 3)]
    read.write_text("three")
    assert do(step) == [f"again, since {read} changed:", kept[0], "ran"]
    (media / "deep" / "a.PNG").write_bytes(b"12")
    assert do(step) == [f"again, since {media} changed:", kept[1], "ran"]
    other = make(tmp_path, read, more=("x",), media=(media,))
    assert do(other) == ["again, since its command changed:", kept[2], "ran"]
    (tmp_path / "made").rename(tmp_path / "elsewhere")
    assert do(other) == ["ran"]
    (tmp_path / "steps.json").write_text("{")
    with pytest.raises(UserError, match="remove it to run every step again"):
        do(other)


def test_a_failed_step_ends_the_run_and_is_done_again(tmp_path):
    """Prevents a failed step counted as done, and later steps that lack its output."""
    failing = RunStep(words=("python", "-c", "raise SystemExit(3)"), makes=tmp_path / "made")
    (tmp_path / "read").write_text("")
    after = make(tmp_path / "after", tmp_path / "read")
    for _ in range(2):
        said: list[str] = []
        assert run_steps([failing, after], tmp_path / "steps.json", said.append) == 3
        assert said == [f"$ {failing.text}"]


def test_a_training_goes_on_to_its_last_step(do, tmp_path):
    """Prevents a stopped training exported or restarted, or resumed with other data."""
    plan = tmp_path / "plan"
    plan.mkdir()
    (plan / "plan.json").write_text("1")

    def train(last_step: int) -> RunStep:
        words = ("python", "-c", TRAIN, str(tmp_path / "run"))
        return RunStep(words=words, reads=(plan,), makes=tmp_path / "run", last_step=last_step)

    after = make(tmp_path, plan)
    stopped = "stopped before step 2; run this command again to go on"
    assert do(train(2), after) == ["ran", stopped]
    assert do(train(2), after) == ["ran", "ran"]
    assert [line[-6:] for line in do(train(2), after)] == ["(done)", "(done)"]
    (plan / "plan.json").write_text("22")
    said = do(train(2))
    kept = f"{tmp_path / 'run'} is kept as {tmp_path / 'run-1'}"
    assert said == [f"again, since {plan} changed:", kept, "ran", stopped]
    assert json.loads((tmp_path / "run-1" / "latest_checkpointed_iteration.txt").read_text()) == 2


def test_a_training_goes_on_with_other_rates_and_more_steps(tmp_path, monkeypatch):
    """Prevents restarting a training for a lower rate, and resuming with another model, seed or
    data than the checkpoint's."""
    monkeypatch.setattr(
        "omnibal.job.plan_files.hash_steps", lambda plan, steps: {3: "a"}.get(steps)
    )
    run, words = tmp_path / "run", ("bash", "train.sh")
    step = Training(words=words, makes=run, last_step=6, plan=tmp_path, options=())
    before = {"read": {}, "model": "m", "options": ["--lr 1"], "steps": [3, "a"]}
    before["command"] = step.text
    goes_on = lambda **changes: step.can_resume(before, before | changes)  # noqa: E731
    assert goes_on(options=["--lr 2", "--save-interval 5"]) and goes_on(steps=[6, "b"])
    assert not goes_on(options=["--lr 1", "--seed 3"]) and not goes_on(model="n")
    assert not goes_on(read={"data.jsonl": "1"}) and not step.can_resume({"read": {}}, before)
    run.mkdir()
    (run / TRACKER_FILE).write_text("6")
    assert goes_on(options=["--lr 1", "--num-workers 5"]) and not goes_on(options=["--lr=2"])


def test_a_training_elsewhere_is_prepared_once(tmp_path):
    """Prevents submitting a finished job again, and mistaking an earlier run for it."""
    run, journal = tmp_path / "run", tmp_path / "steps.json"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    words = ("python", "-c", TRAIN, str(run))
    step = RunStep(words=words, makes=run, last_step=2)
    said: list[str] = []
    assert run_steps([step], journal, said.append, trains=False) == 0
    assert (tmp_path / "run-1").exists() and not run.exists()
    assert said[-1] == "when it has ended, run this command again"
    (tmp_path / "run-1").rename(run)  # output of the submitted job
    said.clear()
    assert run_steps([step], journal, said.append, trains=False) == 0
    assert said == [f"$ {step.text}  (done)"]


def test_first_weights_are_released_given_or_none(tmp_path):
    """Prevents training from random weights that nobody asked for."""
    released, trained = tmp_path / "released", tmp_path / "trained"
    (trained / "iter_0000000").mkdir(parents=True)
    (trained / "tokenizer").mkdir()
    released.mkdir()
    with pytest.raises(UserError, match="holds no weights"):
        choose_weights(str(released), None, from_scratch=False)
    (released / "model.safetensors").write_bytes(b"")
    assert choose_weights(str(released), None, from_scratch=False) == (released, False)
    assert choose_weights("internvl3-8b", trained, from_scratch=False) == (trained, False)
    assert choose_weights("internvl3-8b", None, from_scratch=True) == (None, False)
    assert find_tokenizer("internvl3-8b", trained) == trained / "tokenizer"
    assert find_tokenizer(str(released), trained) == released
    with pytest.raises(UserError, match="--from-scratch for random ones"):
        choose_weights("internvl3-8b", None, from_scratch=False)
    with pytest.raises(UserError, match="leave one out"):
        choose_weights("internvl3-8b", trained, from_scratch=True)


def test_a_checkpoint_is_found_in_the_cache_of_its_hub(tmp_path):
    """Prevents downloading a cached checkpoint without a network, and a traceback after a failed
    download."""
    cached = tmp_path / "models--org--small"
    snapshot = cached / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc")
    (snapshot / "config.json").write_text("{}")
    code = "import sys; from omnibal.cli.run_steps import fetch_checkpoint; "
    code += "print(fetch_checkpoint(sys.argv[1], weights=True))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def fetch(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert fetch("org/small").stdout == f"{snapshot}\n"
    assert "UserError: org/other cannot be fetched (" in fetch("org/other").stderr
