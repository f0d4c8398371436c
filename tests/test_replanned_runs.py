"""Runs that replan during training or after losing devices."""

import json
from pathlib import Path

import pytest
from commands import REPOSITORY
from end_to_end_cases import losses, pair_succeeds, plan_digits, ranks_succeed, records, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omnibal.job.plan import read_plan, write_plan
from omnibal.model.units import unit_names
from omnibal.pipeline.unit_runs import stages_from_cuts


@pytest.fixture(scope="module")
def uneven(lengths, tmp_path_factory) -> Path:
    """A plan with an imbalanced cut: stage 1 has only the last layer and the head."""
    folder = tmp_path_factory.mktemp("plans") / "uneven"
    plan = read_plan(plan_digits(lengths, folder, "--pp", "2", "--epochs", "4"))
    cut = len(unit_names(plan.model)) - 2
    stages = stages_from_cuts(plan.model, (cut,))
    write_plan(plan.model_copy(update={"stages": stages, "prediction": None}), folder)
    return folder


def trained_steps(save: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["samples_sha256"]) for record in records(save)]


WANDB = """
import json
class Run:
    def __init__(self, **options):
        self.options = options
    def log(self, values, step):
        with open(self.options["dir"] + "/wandb.jsonl", "a") as file:
            file.write(json.dumps([self.options["id"], step, values["train/loss"]]) + "\\n")
    def finish(self):
        self.log({"train/loss": 0}, "finished")
init = Run
"""
"""Fake wandb module."""


def test_a_run_is_planned_anew_while_it_trains(uneven, digits, tmp_path):
    """Prevents a replan that changes the samples or weights, or splits the logged curves."""
    (tmp_path / "wandb.py").write_text(WANDB)
    script, started = tmp_path / "pretrain.py", str(REPOSITORY / "pretrain_vlm.py")
    script.write_text(f"import runpy\nrunpy.run_path({started!r}, run_name='__main__')\n")
    save, board, uninterrupted = tmp_path / "run", tmp_path / "board", tmp_path / "whole"
    pair_succeeds(*training(uneven, digits, uninterrupted, "--train-iters", "10"))
    reports = ("--tensorboard-dir", board, "--wandb-project", "project")

    def train(*more: object) -> str:
        return pair_succeeds(script, *training(uneven, digits, save, *reports, *more)[1:])

    output = train("--train-iters", "9", "--replan-at", "4,8")
    assert "not planned again after step 4: the run has logged the passes of 2 steps" in output
    assert "planned again after step 8" in output
    assert [path.name for path in (save / "plans").iterdir()] == ["step_0000008_gpus_2"]
    info = json.loads((save / "run.json").read_text())
    assert info["since_step"] == 8
    resumed = train("--train-iters", "10", "--load", save)
    assert f"going on with {save / 'plans' / 'step_0000008_gpus_2'}" in resumed
    assert trained_steps(save) == trained_steps(uninterrupted)
    assert losses(save) == pytest.approx(losses(uninterrupted), rel=1e-4)
    assert losses(save)[:8] == losses(uninterrupted)[:8]
    logged = [json.loads(line) for line in (save / "wandb.jsonl").read_text().splitlines()]
    assert len({run for run, _, _ in logged}) == 1
    assert [step for _, step, _ in logged] == [*range(1, 10), "finished", 10, "finished"]
    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    for curve in (
        [loss for _, step, loss in logged if step != "finished"],
        [event.value for event in events.Scalars("train/loss")],
    ):
        assert curve == pytest.approx(losses(save))


def test_a_run_goes_on_on_fewer_devices(lengths, digits, tmp_path):
    """Prevents a job that stops when a node is lost, or trains samples twice."""
    save, steps = tmp_path / "run", tmp_path / "whole"
    wide = plan_digits(lengths, tmp_path / "wide", "--dp", "2", "--epochs", "4")
    pair_succeeds(*training(wide, digits, steps, "--train-iters", "5"))
    every_step = ("--elastic", "--save-interval", "1", "--no-async-save", "--train-iters")
    run = training(wide, digits, save, *every_step)
    pair_succeeds(*run, "2")
    assert "planned for the 1 processes" in ranks_succeed(1, *run, "3")
    pair_succeeds(*run, "5")
    assert trained_steps(save) == trained_steps(steps)
    assert losses(save)[:2] == losses(steps)[:2]
    assert losses(save) == pytest.approx(losses(steps), rel=1e-4)
