"""The training loop on toy packs: checkpoints, reports and failures."""

import contextlib
import io
import logging
import math
import os
import pty
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import limit_file_size
from data_parallel_cases import deal_packs
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from toy import OPTIONS, toy_batch

from megatron.vlm.checkpoint.save_load import CheckpointWriter
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.run import gather
from megatron.vlm.run.arguments import CheckpointArguments, RunArguments
from megatron.vlm.run.gather import gather_stage_records
from megatron.vlm.run.health import RunHealth
from megatron.vlm.run.log import show_log
from megatron.vlm.run.loop import RunData, TrainingLoop
from megatron.vlm.step.clock import Phase
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.job.runlog import RUN_FILE, latest_step, read_run
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

STEPS = 8
PACKS_PER_STEP = 2


class BrokenSink:
    """A reporting library with an unreachable server."""

    def write(self, step, values):
        raise ConnectionError("no route to host")

    def close(self):
        raise AssertionError("a dropped sink is not used again")


def run_loop(
    links, plan, folder, poisoned=(), stop_after=None, sinks=(), max_skipped=3,
    unwritable=range(0), **options,
):  # fmt: skip
    """Return (outcome, printed lines, error) of a run. Poisoned steps have NaN pixels.

    In `unwritable` steps, counted from 1, rank 1 has a full disk.
    """
    trainer = build_trainer(plan, links, OPTIONS, steps=STEPS, seed=3)
    batches = [
        toy_batch(plan.model, [(1, 9), (0, 6)], seed=i) for i in range(STEPS * PACKS_PER_STEP)
    ]
    for place in (step * PACKS_PER_STEP for step in poisoned):
        pixels_TCPP = batches[place].pixels_TCPP * math.nan
        batches[place] = replace(batches[place], pixels_TCPP=pixels_TCPP)
    done, printed = [], io.StringIO()
    writer = CheckpointWriter(
        folder, plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS),
        keep_last=None, asynchronous=not unwritable,
    )  # fmt: skip

    def stop_requested():
        done.append(True)
        if unwritable and links.rank == 1:
            limit_file_size(2000 if len(done) in unwritable else -1)
        return len(done) == stop_after and links.rank == 1

    data = RunData(
        stop=STEPS, scheduled=deal_packs(batches, 1, PACKS_PER_STEP), lengths=None,
        sharing=Sharing(dp_rank=0, levels=[Level(caps=Caps.of(tokens=64))]),
        batches=iter(batches), pack_flops=np.full(len(batches), 1e6), peak_flops_per_s=1e9,
    )  # fmt: skip
    others = dict.fromkeys(("samples", "storage", "optimization", "evaluation"))
    checkpoints = CheckpointArguments(save_interval=2, **options)
    arguments = RunArguments(save=folder, checkpoints=checkpoints, **others)
    training = TrainingLoop(
        trainer, iter([data]), arguments, STEPS, writer, RunHealth(max_skipped),
        list(sinks) if links.rank == 0 else [], stop_requested,
    )  # fmt: skip
    with contextlib.redirect_stdout(printed):
        show_log(links.rank)
        try:
            outcome, error = training.run(0, STEPS), None
        except UserError as failure:
            outcome, error = None, str(failure)
    return outcome, printed.getvalue().splitlines(), error


def run_all(folder, **options):
    """Return the results of `run_loop` of both ranks, two stages of the toy model."""
    plan = pipeline_plan(4)
    return run_ranks(plan.parallel, partial(run_loop, **options), plan, folder)


def test_run_is_logged_and_saved(tmp_path):
    """Prevents steps without a record, and a missing last checkpoint."""
    ranks = run_all(tmp_path)
    assert all(outcome.steps == STEPS and not outcome.stopped for outcome, _, _ in ranks)
    records = read_run(tmp_path / RUN_FILE)
    assert [record.step for record in records] == list(range(STEPS))
    for record in records:
        assert (record.samples, record.tiles) == (PACKS_PER_STEP, PACKS_PER_STEP)
        assert record.mfu == pytest.approx(PACKS_PER_STEP * 1e6 / (record.step_ms * 1e6))
    assert latest_step(tmp_path) == STEPS
    told, untold = ranks[0][1], ranks[1][1]
    assert [line for line in told if line.startswith("saved")] == [
        f"saved {tmp_path / f'iter_{step:07d}'}" for step in (2, 4, 6, 8)
    ]
    assert sum(line.startswith("step ") for line in told) == STEPS and untold == []


def memory_of_three_steps(links):
    """Return memory records of a fake device with peaks that accumulate. Rank 1 uses more."""
    gather.has_cuda, cuda, more = lambda: True, torch.cuda, dist.get_rank()
    peaks_gib, retried, records = Counter(), Counter(), []
    cuda.max_memory_allocated = lambda: peaks_gib["allocated"] * 2**30
    cuda.max_memory_reserved = lambda: peaks_gib["reserved"] * 2**30
    cuda.memory_stats = lambda: {"num_alloc_retries": retried["times"]}
    cuda.reset_peak_memory_stats = peaks_gib.clear
    cuda.reset_accumulated_memory_stats = retried.clear
    for allocated, reserved, retries in ((5, 9, 0), (3, 8, 2), (4, 8, 1)):
        peaks_gib |= Counter(allocated=allocated + more, reserved=reserved + more)  # the maximum
        retried["times"] += retries * more
        [record] = gather_stage_records(links, dict.fromkeys(Phase, 1.0))
        records.append((record.peak_gib, record.reserved_gib, record.allocation_retries))
    return records


def test_memory_is_each_steps_own():
    """Prevents the first step's peak shown for all steps, and hidden fragmentation or retries."""
    ranks = run_ranks(Parallel(pipeline=1, data=2), memory_of_three_steps)
    assert ranks == [[(6, 10, 0), (4, 9, 2), (5, 9, 1)]] * 2


def test_one_rank_that_is_asked_stops_all_with_a_checkpoint(tmp_path):
    """Prevents ranks that train on after another rank stops, and a stop without a checkpoint."""
    ranks = run_all(tmp_path, stop_after=3)
    assert all(outcome.steps == 3 and outcome.stopped for outcome, _, _ in ranks)
    assert latest_step(tmp_path) == 3


def test_skipped_steps_are_told_and_no_checkpoint_is_made_of_them(tmp_path):
    """Prevents checkpoints of skipped steps from displacing the last good checkpoint."""
    ranks = run_all(tmp_path, poisoned=(3, 5, 6))
    _, lines, error = ranks[0]
    assert error is None
    told = [line for line in lines if "skipped, the weights are unchanged" in line]
    assert [line.split(":")[0] for line in told] == ["step 3", "step 5", "step 6"]
    assert "(2 in a row, 3 in all)" in told[-1]
    saved = [line[-1] for line in lines if line.startswith("saved")]
    assert saved == ["2", "8"]  # not after steps 3 and 5
    records = read_run(tmp_path / RUN_FILE)
    assert [record.step for record in records if record.skipped] == [3, 5, 6]
    assert all(math.isfinite(record.loss) for record in records if not record.skipped)


def test_too_many_skipped_steps_end_every_rank_with_the_last_checkpoint_whole(tmp_path):
    """Prevents days of skipped steps, and an unfinished save of the step before."""
    ranks = run_all(tmp_path, poisoned=(2, 3, 4, 5), max_skipped=0)
    assert all("1 skipped steps in a row" in error for _, _, error in ranks)
    assert latest_step(tmp_path) == 2
    assert not list(tmp_path.glob("*.part"))


def test_broken_reports_do_not_end_a_run(tmp_path):
    """Prevents training that ends because of a metrics server or a full disk under the log."""
    (tmp_path / RUN_FILE).mkdir()  # no file can be written there
    ranks = run_all(tmp_path, sinks=(BrokenSink(),))
    outcome, lines, _ = ranks[0]
    assert outcome.steps == STEPS
    assert sum("BrokenSink gets nothing from step 1 on" in line for line in lines) == 1
    assert sum("is not logged, training goes on" in line for line in lines) == STEPS
    assert latest_step(tmp_path) == STEPS


@pytest.mark.parametrize(
    ("unwritable", "most", "trained", "newest", "verdict"),
    [
        pytest.param(range(3, 9), 2, 6, 2, "2 failed saves in a row, and 2,", id="two-in-a-row"),
        pytest.param(range(1, 9), 3, 6, None, "3 failed saves in a row, and 3,", id="all"),
        pytest.param(range(7, 9), 2, 8, 6, "1 failed saves in a row, and 2,", id="the-last"),
        pytest.param((1, 2, 5, 6), 2, 8, 8, None, id="never-two-in-a-row"),
    ],
)
def test_failed_saves_in_a_row_end_every_rank(tmp_path, unwritable, most, trained, newest, verdict):
    """Prevents a run of days without a checkpoint because every save fails."""
    ranks = run_all(tmp_path, unwritable=unwritable, exit_after_failed_saves=most)
    assert len(read_run(tmp_path / RUN_FILE)) == trained
    assert latest_step(tmp_path) == newest
    for outcome, _, error in ranks:
        assert (outcome is None) == (verdict is not None)
        assert verdict is None or (verdict in error and "File too large" in error)


@pytest.mark.in_own_process
def test_log_of_a_daemon_goes_nowhere():
    """Prevents a run without terminal streams from ending at its first log line."""
    sys.stdout = sys.stderr = None
    show_log(0)
    log = logging.getLogger("megatron.vlm")
    log.info("a line")
    log.warning("a warning")


@pytest.mark.in_own_process
def test_log_outlives_its_terminal(monkeypatch):
    """Prevents a failed save at SIGHUP because the terminal for its message is closed."""
    keyboard, terminal = pty.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w"))
    show_log(0)
    log = logging.getLogger("megatron.vlm")
    log.info("a line")
    assert os.read(keyboard, 100) == b"a line\r\n"
    os.close(keyboard)
    log.info("lost")
    log.info("lost too")
    sys.stdout.close()  # flushes the buffer
