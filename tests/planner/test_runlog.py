"""The run's files: written by training and read by reports, also during a run."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from omnibal.base.errors import UserError
from omnibal.job.runlog import (
    EVALUATION_FILE,
    RUN_FILE,
    RUN_INFO_FILE,
    Evaluation,
    KindAccuracy,
    RunInfo,
    StageRecord,
    StepRecord,
    append_record,
    drop_records,
    is_timed,
    read_evaluation,
    read_run,
    read_run_info,
    samples_digest,
    write_evaluation,
    write_run_info,
)
from omnibal.report.summary import summarise_run

pytestmark = pytest.mark.quick

STAGE = StageRecord(forward_ms=1, backward_ms=2, wait_ms=3, data_ms=0, optimizer_ms=1, peak_gib=0.5)


def record(step: int, **changed) -> StepRecord:
    counts = {"epoch": 0, "loss_tokens": 10, "samples": 2, "tiles": 3, "tokens": 90}
    figures = {"loss": 1.5, "step_ms": 7.0, "learning_rate": 1e-3, "grad_norm": 0.25}
    return StepRecord(**({"step": step, "stages": (STAGE,)} | counts | figures | changed))


def write_lines(path: Path, *records: StepRecord, tail: str = "") -> Path:
    path.write_text("".join(entry.model_dump_json() + "\n" for entry in records) + tail)
    return path


def test_times_of_data_parallel_encoders_are_written_where_there_are_any(tmp_path):
    """Prevents changed logs without data-parallel encoders, and lost times of these encoders."""
    encoding = STAGE.model_copy(update={"encoder_ms": 4.0, "exchange_ms": 0.5})
    path = write_lines(tmp_path / "run.jsonl", record(0), record(1, stages=(encoding,)))
    names = [set(json.loads(line)["stages"][0]) for line in path.read_text().splitlines()]
    assert names[1] - names[0] == {"encoder_ms", "exchange_ms"}
    assert [entry.stages[0] for entry in read_run(path)] == [STAGE, encoding]
    summary = summarise_run([record(0, stages=(encoding,))], 1, None)
    assert (summary.stages[0].encoder_ms, summary.stages[0].exchange_ms) == (4.0, 0.5)


def test_items_of_encoders_are_written_by_their_names(tmp_path):
    """Prevents logging tiles for native-resolution images, and losing their tokens."""
    native = record(1, tiles=0, image_tokens=900)
    path = write_lines(tmp_path / "run.jsonl", record(0), native)
    tiled, of_images = (json.loads(line) for line in path.read_text().splitlines())
    assert (tiled["tiles"], of_images["image_tokens"]) == (3, 900)
    assert of_images.keys() - tiled.keys() == {"image_tokens"} and "tiles" not in of_images
    assert read_run(path)[1] == native


def test_memory_of_an_older_log_is_read(tmp_path):
    """Prevents refusing to report a run because its older log has fewer figures."""
    path = tmp_path / "run.jsonl"
    older = record(0).model_dump(mode="json")
    for key in ("reserved_gib", "allocation_retries"):
        del older["stages"][0][key]
    path.write_text(json.dumps(older) + "\n")
    assert read_run(path) == [record(0)]


def test_the_last_line_of_a_step_counts(tmp_path):
    """Prevents a resumed run from being read twice, or out of order."""
    path = write_lines(tmp_path / "run.jsonl", record(1), record(0), record(1, loss=0.5))
    assert read_run(path) == [record(0), record(1, loss=0.5)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_step_is_written_and_read(tmp_path, loss):
    """Prevents an unreadable log of a diverged run."""
    path = write_lines(tmp_path / "run.jsonl", record(0, loss=loss, grad_norm=math.nan))
    (again,) = read_run(path)
    assert again.loss == pytest.approx(loss, nan_ok=True)
    assert math.isnan(again.grad_norm)
    with pytest.raises(ValueError, match="step_ms"):
        record(0, step_ms=math.nan)


@pytest.mark.parametrize("cut", [1, 10, 60, None])
def test_a_line_that_is_being_written_is_left_out(tmp_path, cut):
    """Prevents reports that fail during a run, and records appended to a partial line."""
    path = tmp_path / "run.jsonl"
    append_record(record(0), path)
    path.write_text(path.read_text() + record(1).model_dump_json()[:cut])
    assert read_run(path) == [record(0)]
    append_record(record(1, loss=9.0), path)
    assert read_run(path) == [record(0), record(1, loss=9.0)]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (RUN_FILE, None, "no such file; pretrain_vlm.py writes it"),
        (RUN_FILE, b"", "holds no step yet"),
        (RUN_FILE, b'{"step": 0', "holds no step yet"),
        (RUN_FILE, b'{"step": 0\n', "line 1: Invalid JSON"),
        (RUN_FILE, b"\n", "line 1: Invalid JSON"),
        (RUN_FILE, b"{}\n", "line 1: step: Field required"),
        (RUN_FILE, b"\xff\n", "not UTF-8"),
        (RUN_INFO_FILE, None, ".*; pretrain_vlm.py writes it into --save"),
        (RUN_INFO_FILE, b"{", ".*; pretrain_vlm.py writes it into --save"),
        (RUN_INFO_FILE, b'{"model": "m"}', ".*; pretrain_vlm.py writes it into --save"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, name, content, expected):
    """Prevents silently missing steps in a report, and a traceback for another folder."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: {expected}"):
        read_run(path) if name == RUN_FILE else read_run_info(tmp_path)


def test_run_info_and_evaluation_come_back(tmp_path):
    """Prevents lost accuracies, confused runs, and refusing a run without evaluation."""
    info = RunInfo(model="internvl-digits", packs_sha256="ab")
    write_run_info(info, tmp_path)
    assert read_run_info(tmp_path) == info
    assert read_evaluation(tmp_path) is None
    kind = KindAccuracy(kind="single", questions=4, correct=3, chance=0.25)
    evaluation = Evaluation(step=9, kinds=(kind,), examples=())
    path = write_evaluation(evaluation, tmp_path)
    assert read_evaluation(tmp_path) == evaluation
    assert {path, *tmp_path.iterdir()} == {tmp_path / RUN_INFO_FILE, tmp_path / EVALUATION_FILE}
    path.write_text('{"step": -1}')
    with pytest.raises(UserError, match=r"evaluation\.json: step: .*; run the evaluation again"):
        read_evaluation(tmp_path)


def test_steps_that_no_checkpoint_holds_are_dropped(tmp_path):
    """Prevents figures of steps trained again, and dropping lines that the reader refuses."""
    path = tmp_path / RUN_FILE
    drop_records(path, 3)
    assert not path.exists()
    write_lines(path, *map(record, (0, 1, 2, 3, 4, 2)), tail='odd\n{"step": 1')
    drop_records(path, 3)
    lines = path.read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines[:4]] == [0, 1, 2, 2]
    assert lines[4:] == ["odd", ""]


def test_samples_digest_is_of_the_set():
    """Prevents a digest that depends on packs or ranks, or ignores samples."""
    expected = hashlib.sha256(np.array([2, 3, 300], "<i8").tobytes()).hexdigest()[:16]
    assert samples_digest(np.array([300, 2, 3], np.int32)) == expected
    assert samples_digest(np.array([300, 2, 4])) != expected


def test_steps_are_timed_at_first_and_now_and_then():
    """Prevents a log that grows with every pass of a long run, or stops timing passes."""
    timed = [step for step in range(40, 200) if is_timed(step, 40)]
    assert timed == [*range(40, 140), 140, 150, 160, 170, 180, 190]


def test_a_slow_rank_is_named():
    """Prevents a slow device hidden in the mean over ranks."""

    def stage(*ranks_ms: float) -> StageRecord:
        times = dict.fromkeys(("forward_ms", "backward_ms", "wait_ms", "data_ms"), 1.0)
        return StageRecord(**times, optimizer_ms=1.0, peak_gib=1.0, ranks_ms=ranks_ms)

    noises = enumerate((10, 40, 10.2))
    stages = {step: (stage(10, 10.5, 9.8), stage(10, noise, 15)) for step, noise in noises}
    records = [record(step, stages=of_step) for step, of_step in stages.items()]
    [slow] = summarise_run(records, 6, None).slow_ranks
    assert (slow.stage, slow.rank) == (1, 2)
    assert slow.factor == pytest.approx(15 / 10.2)
