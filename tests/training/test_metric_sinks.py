"""Where figures go besides the run log, when it is there and when it is not."""

import sys
from types import SimpleNamespace

import pytest

from megatron.vlm.run.metrics import TensorBoardSink, WandbSink, step_values
from omnibal.base.errors import UserError
from omnibal.job.runlog import StageRecord, StepRecord

STAGE = StageRecord(
    forward_ms=1, backward_ms=2, wait_ms=3, data_ms=0, optimizer_ms=1, peak_gib=0.5
)  # fmt: skip
RECORD = StepRecord(
    step=7, epoch=0, loss=1.5, loss_tokens=9, samples=4, tiles=3, tokens=20, step_ms=500,
    learning_rate=1e-3, grad_norm=0.2, stages=(STAGE, STAGE),
)  # fmt: skip


def test_step_values_are_the_records():
    """Prevents: curves of another unit than their name says."""
    values = step_values(RECORD)
    assert values["train/loss"] == 1.5
    assert values["speed/samples_per_s"] == pytest.approx(8)
    assert values["stage_1/wait_ms"] == 3


def test_wandb_gets_every_value_with_its_step(monkeypatch, tmp_path):
    """Prevents: a project that stays empty, or has a run for every start. The library itself is
    stood in for."""
    logged, started = [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=list)
    library = SimpleNamespace(init=lambda **options: (started.append(options), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", library)
    sink = WandbSink("project", "name", tmp_path)
    sink.write(7, step_values(RECORD))
    sink.close()
    WandbSink("project", "name", tmp_path)
    first, again = started
    assert first["project"] == "project"
    assert again["id"] == first["id"] and again["resume"] == "allow"
    assert logged == [(7, step_values(RECORD))]


@pytest.mark.parametrize(
    ("missing", "open_sink"),
    [
        ("wandb", lambda folder: WandbSink("project", "name", folder)),
        ("torch.utils.tensorboard", lambda folder: TensorBoardSink(folder, 0)),
    ],
)
def test_missing_library_is_said(monkeypatch, tmp_path, missing, open_sink):
    """Prevents: a traceback, or a run without the curves that were asked for."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"is not installed; pip install"):
        open_sink(tmp_path)
