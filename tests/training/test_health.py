"""Messages about failed steps, and metrics written to other tools than the run log."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import record_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.vlm.run.health import RunHealth
from megatron.vlm.run.metrics import TensorBoardSink, WandbSink, step_values
from omnibal.base.errors import UserError
from omnibal.job.runlog import StageRecord, StepRecord

pytestmark = pytest.mark.quick


def test_spike_is_reported_and_noise_is_not():
    """Prevents a missed loss spike, and reports of noise or of first steps."""
    first = RunHealth(max_skipped=0)
    assert not any(first.judge(step, loss) for step, loss in enumerate([1.0, 9.0, 2.0, 8.0]))
    random = np.random.default_rng(0)
    health = RunHealth(max_skipped=0)
    losses = 2.0 - 0.001 * np.arange(300) + 0.05 * random.standard_normal(300)
    with record_logs() as lines:
        assert not any(health.judge(step, loss) for step, loss in enumerate(losses))
        assert lines == []
        assert health.judge(300, 3.0)
    assert "step 300: the loss jumped to 3.0000 from about 1.7" in lines[0]


def test_run_stops_after_too_many_skipped_steps_in_a_row():
    """Prevents days of a diverged run, and stopping a run that recovers each time."""
    health = RunHealth(max_skipped=2, skipped_steps=5)
    for step in range(0, 30, 3):
        with record_logs() as lines:
            health.judge(step, math.nan, skipped=True)
            health.judge(step + 1, 1.0, skipped=True)
            health.judge(step + 2, 1.0)
        nan, infinite = lines
        assert "the loss is nan" in nan and "a gradient is not finite" in infinite
    assert health.skipped_steps == 25
    for step in (30, 31):
        health.judge(step, math.nan, skipped=True)
    with pytest.raises(UserError, match="3 skipped steps in a row, more than 2"):
        health.judge(32, math.nan, skipped=True)


def test_run_stops_when_most_images_are_gone():
    """Prevents training on text only after a disk was unmounted."""
    health = RunHealth(max_skipped=0)
    with record_logs() as lines:
        health.judge(0, 1.0, replaced_share=0.5)
    assert lines == []
    with pytest.raises(UserError, match="75% of its samples cannot be read"):
        health.judge(1, 1.0, replaced_share=0.75)


STAGE = StageRecord(
    forward_ms=1, backward_ms=2, wait_ms=3, data_ms=0, optimizer_ms=1, peak_gib=0.5
)  # fmt: skip
LOSSES = ("train/loss", "validation/loss")
RECORD = StepRecord(
    step=7, epoch=0, loss=1.5, loss_tokens=9, samples=4, tiles=3, tokens=20, step_ms=500,
    learning_rate=1e-3, grad_norm=0.2, stages=(STAGE, STAGE),
)  # fmt: skip


def test_wandb_gets_every_value_with_its_step(monkeypatch, tmp_path):
    """Prevents an empty project, a new run for every restart, and curves in other units."""
    written, started = [], []
    run = SimpleNamespace(log=lambda values, step: written.append((step, values)), finish=list)
    stand_in = SimpleNamespace(init=lambda **options: (started.append(options), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sinks = [WandbSink("project", "name", tmp_path) for _ in range(2)]
    sinks[0].write(7, step_values(RECORD))
    sinks[0].close()
    first, again = started
    assert first["project"] == "project"
    assert again["id"] == first["id"] and again["resume"] == "allow"
    [(step, values)] = written
    assert step == 7 and values == step_values(RECORD)
    some = {"train/loss": 1.5, "speed/samples_per_s": 8.0, "stage_1/wait_ms": 3}
    assert {name: values[name] for name in some} == pytest.approx(some)


def test_tensorboard_shows_every_point_once_after_a_resume(tmp_path):
    """Prevents a validation hidden by a resume at its step, and steps shown twice."""
    for resumed, steps in ((0, range(1, 5)), (2, range(3, 7))):
        sink = TensorBoardSink(tmp_path, resumed)
        for step in steps:
            sink.write(step, {"train/loss": step + resumed})
            if step % 2 == 0:
                sink.write(step, {"validation/loss": step + resumed})
        sink.close()
    shown = EventAccumulator(str(tmp_path)).Reload()
    points = {name: [(each.step, each.value) for each in shown.Scalars(name)] for name in LOSSES}
    assert points["train/loss"] == [(1, 1), (2, 2), (3, 5), (4, 6), (5, 7), (6, 8)]
    assert points["validation/loss"] == [(2, 2), (4, 6), (6, 8)]


@pytest.mark.parametrize(
    ("missing", "open_sink"),
    [
        ("wandb", lambda folder: WandbSink("project", "name", folder)),
        ("torch.utils.tensorboard", lambda folder: TensorBoardSink(folder, 0)),
    ],
)
def test_missing_library_is_said(monkeypatch, tmp_path, missing, open_sink):
    """Prevents a traceback, and a run without the requested curves."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"is not installed; pip install"):
        open_sink(tmp_path)
