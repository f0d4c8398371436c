"""Saves with failed writes and killed processes: saved steps survive, and training continues."""

import functools
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections import namedtuple
from multiprocessing import connection
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_cases import limit_file_size, parts_of, refusals
from ranks import TIMEOUT_S, record_logs, run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint import save_load as checkpoint
from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.run_folders import (
    CHECKSUMS_FILE,
    begin_checkpoint,
    name_newest,
    part_path,
)
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.run.launch import RankLaunch, initialize_distributed
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.job.runlog import TRACKER_FILE, checkpoint_path, latest_step

PACKS = [[(1, 8)], [(0, 9)]]
SCHEDULED_STEPS = 10_000
KILLS = ((0, 2), (1, 1), (0, 9), (1, 4), (0, 20), (0, 70))
"""Rank to kill and number of its file operation, by run."""


def two_stages(**vision_changes):
    model = toy_model(**vision_changes)
    return toy_plan(model, stages_of(model, 4))


def start(links, plan, directory, asynchronous, keep_last=None):
    """Return a trainer, the arguments of `load_checkpoint`, and a writer of its state."""
    trainer = build_trainer(plan, links, OPTIONS, steps=SCHEDULED_STEPS, seed=3)
    parts = parts_of(trainer)
    writer = CheckpointWriter(directory, *parts, keep_last=keep_last, asynchronous=asynchronous)
    return trainer, parts, writer


def step_loss(trainer, step):
    model = trainer.plan.model
    batches = [toy_batch(model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]
    return train_step(trainer, MicroBatchStream.of(batches)).loss


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def save_through_failure(links, plan, directory, asynchronous, fail):
    """Train three steps with a save after each, then load the last. The second save fails on this
    rank by `fail`."""
    trainer, parts, writer = start(links, plan, directory, asynchronous)
    losses, lines = [], []
    for step in (1, 2, 3):
        losses.append(step_loss(trainer, step))
        with record_logs() as told:
            if step == 2:
                fail(writer)
            else:
                writer.save(step, {})
            writer.finish()
        # Only some ranks have remaining files.
        lines.append([line.partition("; its files are not removed")[0] for line in told])
        if step == 2:
            limit_file_size(resource.RLIM_INFINITY)
            kept = names(directory) if dist.get_rank() == 0 else None
    return losses, lines, kept, load_checkpoint(directory, *parts).step


def reference_losses(links, plan, steps):
    trainer = build_trainer(plan, links, OPTIONS, steps=SCHEDULED_STEPS, seed=3)
    return [step_loss(trainer, step) for step in steps]


@functools.cache
def unlimited_losses():
    """Return losses of three steps without saves."""
    plan = two_stages()
    return run_ranks(plan.parallel, reference_losses, plan, (1, 2, 3))[0]


def resumed_step(links, plan, directory):
    _, parts, _ = start(links, plan, directory, False)
    return load_checkpoint(directory, *parts).step


def full_disk(rank):
    def fail(writer):
        if dist.get_rank() == rank:
            limit_file_size(2000)
        writer.save(2, {})

    return fail


def full_at_the_end(limit):
    def fail(writer):
        writer.save(2, {})
        while not (part_path(writer._directory, 2) / "common.pt").is_file():
            time.sleep(0.01)
        writer._threads.shutdown(wait=True)
        limit_file_size(limit)
        writer._complete(writer._pending)
        writer._threads = checkpoint.ThreadPoolExecutor(2)

    return fail


def too_little_space(writer):
    usage = namedtuple("usage", "free")
    whole, checkpoint.shutil.disk_usage = shutil.disk_usage, lambda path: usage(free=100_000)
    writer.save(2, {})
    checkpoint.shutil.disk_usage = whole


def file_in_the_way(writer):
    # Permissions do not bind root; a file in the way fails for every user.
    blocker = part_path(writer._directory, 2)
    if dist.get_rank() == 0:
        blocker.write_text("")
    writer.save(2, {})
    writer.finish()
    if dist.get_rank() == 0:
        blocker.unlink()


OF_RANK = r"step 2 is not saved: rank {0}: \S*iter_0000002.part/__{0}_0.distcp: File"
FAILURES = {
    "write": (False, full_disk(1), OF_RANK.format(1)),
    "write-async": (True, full_disk(0), OF_RANK.format(0)),
    "metadata": (True, full_at_the_end(10), "step 2 is not saved: rank 0: .*File too large"),
    "empty": (True, full_at_the_end(0), "step 2 is not saved: rank 0: .*File too large"),
    "space": (True, too_little_space, "a checkpoint takes .* GiB, and only .* are free"),
    "folder": (False, file_in_the_way, "step 2 is not saved: rank 0: .*Not a directory"),
}
"""(asynchronous, failure of the second save, message)."""


@pytest.mark.parametrize(("asynchronous", "fail", "reason"), FAILURES.values(), ids=FAILURES)
def test_failed_save_leaves_all_training(tmp_path, asynchronous, fail, reason):
    """Prevents deadlock after a rank's write fails early or late in a save, training that stops,
    and checkpoints that are incomplete or fill the disk."""
    plan = two_stages()
    results = run_ranks(plan.parallel, save_through_failure, plan, tmp_path, asynchronous, fail)
    (losses, lines, kept, step), (_, other_lines, _, other_step) = results
    assert kept == ["iter_0000001", TRACKER_FILE] and step == other_step == 3
    assert lines == other_lines
    assert lines[0] == [f"saved {checkpoint_path(tmp_path, 1)}"]
    assert lines[2] == [f"saved {checkpoint_path(tmp_path, 3)}"]
    [line] = lines[1]
    assert re.search(reason, line), line
    assert line.endswith(f"; {checkpoint_path(tmp_path, 1)} stays the newest one")
    assert losses == unlimited_losses()


def save_steps(links, plan, directory, asynchronous, keep_last, steps):
    _, _, writer = start(links, plan, directory, asynchronous, keep_last)
    for step in steps:
        writer.save(step, {})
    writer.finish()


@pytest.mark.parametrize(
    ("asynchronous", "keep_last"),
    [(False, None), (True, 1), (False, 2)],
    ids=["sync-all", "async-1", "sync-2"],
)
def test_only_the_newest_checkpoints_are_kept(tmp_path, asynchronous, keep_last):
    """Prevents disks that fill up, and removal of the checkpoint that a resume would load."""
    plan = two_stages()
    for step in (3, 9):
        (begin_checkpoint(tmp_path, step) / "rest").write_text("")
    run_ranks(plan.parallel, save_steps, plan, tmp_path, asynchronous, keep_last, [1, 2, 4, 5])
    rests = [3, 9] if keep_last is None else [9]
    expected = [checkpoint_path(tmp_path, step) for step in [1, 2, 4, 5][-(keep_last or 4) :]]
    expected += [part_path(tmp_path, step) for step in rests]
    assert names(tmp_path) == sorted([*(path.name for path in expected), TRACKER_FILE])
    assert latest_step(tmp_path) == 5


def test_going_back_keeps_what_is_newer(tmp_path):
    """Prevents a return to step 2 by the tracker file from counting step 5 as the newest."""
    plan = two_stages()
    run_ranks(plan.parallel, save_steps, plan, tmp_path, False, None, [1, 2, 5])
    (tmp_path / TRACKER_FILE).write_text("2")
    run_ranks(plan.parallel, save_steps, plan, tmp_path, False, 2, [3])
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000005", TRACKER_FILE]


def test_rests_of_another_layout_are_overwritten(tmp_path):
    """Prevents files of an interrupted save being loaded with the save that replaced it."""
    plan = two_stages()
    part = begin_checkpoint(tmp_path, 1)
    for name in ("__1_0.distcp", "__7_0.distcp", ".metadata", "common.pt"):
        (part / name).write_bytes(b"rest")
    # Newer than the tracker file: a kill between the last two operations.
    shutil.copytree(part, checkpoint_path(tmp_path, 2))
    run_ranks(plan.parallel, save_steps, plan, tmp_path, False, None, [1, 2])
    for step in (1, 2):
        assert "__7_0.distcp" not in names(checkpoint_path(tmp_path, step))
    assert run_ranks(plan.parallel, resumed_step, plan, tmp_path)


DAMAGES = {
    "removed": Path.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "spoilt": lambda path: path.write_bytes(b"\x80garbage"),
}


def test_broken_checkpoints_are_refused_on_every_rank(tmp_path):
    """Prevents a traceback, and ranks that hang if another rank cannot read its file."""
    plan = two_stages()
    run_ranks(plan.parallel, save_steps, plan, tmp_path / "whole", False, None, [1])
    directories = []
    for file in (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        for name, damage in DAMAGES.items():
            directories.append(tmp_path / f"{name}{file}")
            shutil.copytree(tmp_path / "whole", directories[-1])
            damage(checkpoint_path(directories[-1], 1) / file)
    first, second = run_ranks(plan.parallel, refusals, plan, directories, OPTIONS, SCHEDULED_STEPS)
    assert first == second
    both_ways = [directory for directory in directories for _ in range(2)]
    for directory, message in zip(both_ways, first, strict=True):
        assert message.startswith(f"{checkpoint_path(directory, 1)}: "), message
        assert message.endswith(f"name an earlier checkpoint in {directory / TRACKER_FILE}")
        assert "\n" not in message


def test_every_flipped_byte_is_found(tmp_path):
    """Prevents training on weights, moments or a position corrupted on disk."""
    plan, draw = two_stages(), random.Random(49)
    run_ranks(plan.parallel, save_steps, plan, tmp_path, False, None, [1])
    path = checkpoint_path(tmp_path, 1)
    assert open_newest(tmp_path).step == 1
    files = sorted(file for file in path.iterdir() if file.stat().st_size)
    assert len(files) >= 6
    for file in (*files, *draw.choices(files, [file.stat().st_size for file in files], k=64)):
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        flipped = bytes([whole[place] ^ draw.randrange(1, 256)])
        file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(UserError, match=re.escape(str(path))):
            open_newest(tmp_path)
        file.write_bytes(whole)
    assert open_newest(tmp_path).step == 1


def load_and_save(links, plan, directory, saved_step):
    """Resume, then save as the run would. Return logged lines and the loaded step."""
    _, parts, _ = start(links, plan, directory, False)
    with record_logs() as lines:
        step = load_checkpoint(directory, *parts).step
    if dist.get_rank() == 0:
        name_newest(directory, step)
    dist.barrier()
    writer = CheckpointWriter(directory, *parts, keep_last=None, asynchronous=False)
    writer.save(saved_step, {})
    writer.finish()
    return lines, step


def test_a_broken_newest_save_falls_back_to_the_one_before(tmp_path):
    """Prevents a failed resume if only the newest save is damaged, ranks that load different steps,
    and a resumed run that mistakes the damaged save for its own."""
    plan = two_stages()
    whole = tmp_path / "whole"
    run_ranks(plan.parallel, save_steps, plan, whole, False, None, [1, 2, 3])
    damages = {
        "gone": ({3: shutil.rmtree}, 2),
        "half": ({3: lambda path: (path / "__1_0.distcp").unlink()}, 2),
        "unsigned": ({3: lambda path: (path / CHECKSUMS_FILE).unlink()}, 2),
        "cut": ({step: lambda path: DAMAGES["cut"](path / "__0_1.distcp") for step in (2, 3)}, 1),
    }
    for name, (damage, expected) in damages.items():
        directory = shutil.copytree(whole, tmp_path / name)
        for step, change in damage.items():
            change(checkpoint_path(directory, step))
        with record_logs() as told:
            found = open_newest(directory)
        assert found.step == expected
        [line] = told
        assert line.startswith(f"{checkpoint_path(directory, 3)}: ")
        assert line.endswith(f"; until then, {found.path} is loaded")
    ranks = run_ranks(plan.parallel, load_and_save, plan, directory, 3)
    assert ranks == [([line], expected)] * 2
    assert open_newest(directory).step == 3


def kill_at_operation(directory, number):
    """Kill this process at file operation `number` in a directory."""
    done = []

    def audit(event, arguments):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree"):
            done.extend([event] * str(arguments[0]).startswith(str(directory)))
            if len(done) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def train_until_killed(rank, plan, directory, asynchronous, store, kill):
    """Resume, then train and save after every step; record both."""
    launch = RankLaunch(rank=rank, world_size=2, local_rank=rank)
    links = initialize_distributed(launch, plan.parallel, 0, dist.FileStore(str(store), 2))
    trainer, parts, writer = start(links, plan, directory, asynchronous, keep_last=2)
    step = 0
    if latest_step(directory) is not None:
        step = load_checkpoint(directory, *parts).step
    with Path(f"{store}.record").open("a", buffering=1) as record:
        print("resumed", step, file=record)
        if rank == kill[0]:
            kill_at_operation(directory, kill[1])
        while True:
            loss = step_loss(trainer, step)
            print("loss", step, loss.hex(), file=record)
            step += 1
            with record_logs() as lines:
                writer.save(step, {})
                writer.poll()
            for line in lines:
                print(line, file=record)


def killed_run(plan, directory, asynchronous, store, kill):
    """Return the record of a run with one rank killed during a save, then the other."""
    arguments = (plan, directory, asynchronous, store, kill)
    fork = multiprocessing.get_context("fork").Process
    processes = [fork(target=train_until_killed, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    assert connection.wait([process.sentinel for process in processes], TIMEOUT_S)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    record = Path(f"{store}.record").read_text()
    return [line.split() for line in record.splitlines()]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_killed_at_any_moment_loses_nothing_saved(tmp_path, asynchronous):
    """Prevents a kill during a save, rename or removal from losing an earlier checkpoint."""
    plan = two_stages(hidden_size=64, ffn_hidden_size=256)
    directory = tmp_path / "run"
    directory.mkdir()
    announced, losses, cut_short = 0, {}, 0
    for number, kill in enumerate(KILLS):
        record = killed_run(plan, directory, asynchronous, tmp_path / f"store{number}", kill)
        assert int(record[0][1]) >= announced
        for kind, *told in record:
            if kind == "loss":
                assert losses.setdefault(int(told[0]), told[1]) == told[1]
            elif kind == "saved":
                announced = int(told[0].rpartition("_")[2])
        assert (latest_step(directory) or 0) >= announced
        cut_short += any(name.endswith(".part") for name in names(directory))
    assert cut_short > 2, "no kill hit a save"
    assert announced > 0, "nothing was saved"
    run_ranks(plan.parallel, resumed_step, plan, directory)
    [expected, _] = run_ranks(plan.parallel, reference_losses, plan, range(len(losses)))
    assert [float.fromhex(losses[step]) for step in range(len(losses))] == expected
