"""Stopping and resuming: weights equal an uninterrupted run's."""

import functools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from adapter_cases import EVERYWHERE
from checkpoint_cases import PACKS, TOTAL_STEPS, content, parts_of, refusals, train_range
from conversion_file_cases import assert_equal_tensors
from megatron.core import parallel_state
from ranks import record_logs, run_ranks
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint import save_load as checkpoint
from megatron.vlm.checkpoint.run_folders import part_path
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.job.runlog import TRACKER_FILE, checkpoint_path, latest_step
from omnibal.model.parallel import Parallel


def run_range(plan, *arguments, **options):
    ranks = run_ranks(plan.parallel, train_range, plan, *arguments, **options)
    weights = {name: value for _, own in ranks for name, value in own.items()}
    return ranks[0][0], weights


class StoppedRun(NamedTuple):
    """An uninterrupted run, and a run stopped and saved after half of its steps."""

    plan: Plan
    losses: list[float]
    weights: dict[str, torch.Tensor]
    first_losses: list[float]
    checkpoint: Path


def stop_halfway(plan: Plan, folder: Path) -> StoppedRun:
    whole = run_range(plan, 0, TOTAL_STEPS, None, None)
    first, _ = run_range(plan, 0, 3, None, folder)
    return StoppedRun(plan, *whole, first, folder)


def assert_resumes(half_run: StoppedRun) -> None:
    """Assert that the second half gives the uninterrupted run's losses and weights, bit for bit."""
    assert latest_step(half_run.checkpoint) == 3
    rest, resumed = run_range(half_run.plan, 3, TOTAL_STEPS, half_run.checkpoint, None)
    assert half_run.first_losses + rest == half_run.losses
    assert_equal_tensors(resumed, half_run.weights)


@pytest.fixture(scope="module")
def stopped_on(tmp_path_factory):
    """Return a function from data-parallel size to a stopped two-stage run (read-only)."""

    @functools.cache
    def half_run(pipelines):
        model = toy_model()
        plan = toy_plan(model, stages_of(model, 4), data=pipelines)
        return stop_halfway(plan, tmp_path_factory.mktemp("stopped"))

    return half_run


@pytest.mark.parametrize("pipelines", [1, 2])
def test_resumed_equals_uninterrupted_bit_for_bit(stopped_on, pipelines):
    """Prevents a checkpoint that restores optimizer, schedule or weights inexactly."""
    assert_resumes(stopped_on(pipelines))


@pytest.mark.parametrize(
    ("pipelines", "cuts", "after"),
    [
        pytest.param(1, (2, 4, 7), 1, id="four-stages"),
        pytest.param(1, (), 2, id="two-pipelines-of-one-stage"),
        pytest.param(2, (), 1, id="one-stage"),
        pytest.param(2, (8,), 1, id="other-cut"),
    ],
)
def test_resumes_under_another_split(stopped_on, pipelines, cuts, after):
    """Prevents a checkpoint that only the pipeline split that saved it can load."""
    half_run = stopped_on(pipelines)
    model = half_run.plan.model
    other = toy_plan(model, stages_of(model, *cuts), data=after)
    losses, resumed = run_range(other, 3, TOTAL_STEPS, half_run.checkpoint, None)
    assert losses == pytest.approx(half_run.losses[3:], rel=1e-5)
    for name, expected in half_run.weights.items():
        torch.testing.assert_close(resumed[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("cut", "changes"),
    [(3, {"frozen": ("vision",)}), (8, {"frozen": ("language",)}), (4, {"adapters": EVERYWHERE})],
    ids=["vision", "language", "adapters"],
)
def test_resumes_where_a_whole_stage_is_frozen_or_adapted(tmp_path, cut, changes):
    """Prevents optimizer settings lost if the stage that stores them trains nothing, and adapters
    or their moments missing from a checkpoint."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, cut)).model_copy(update=changes)
    half_run = stop_halfway(plan, tmp_path)
    assert any(".adapters." in name for name in half_run.weights) == ("adapters" in changes)
    assert_resumes(half_run)


def save_while_training(links, plan, directory):
    """Save after step 2 in both modes; hold back asynchronous writes until step 5 is done."""
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=3)
    parts = parts_of(trainer)
    at_once = CheckpointWriter(directory / "sync", *parts, keep_last=None, asynchronous=False)
    later = CheckpointWriter(directory / "async", *parts, keep_last=None, asynchronous=True)
    gate = threading.Event()
    for _ in range(2):
        later._threads.submit(gate.wait)
    for step in range(5):
        batches = [toy_batch(plan.model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]
        own = batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
        train_step(trainer, MicroBatchStream.of(own))
        if step == 1:
            trainer.wait_for_weights()
            at_once.save(2, {"skipped": 1})
            later.save(2, {"skipped": 1})
        with record_logs() as lines:
            later.poll()
        assert lines == []
    assert list(part_path(directory / "async", 2).iterdir()) == []
    assert latest_step(directory / "async") is None
    dist.barrier()
    gate.set()
    with record_logs() as lines:
        later.finish()
    assert lines == [f"saved {checkpoint_path(directory / 'async', 2)}"]
    loaded = load_checkpoint(directory / "async", *parts)
    assert (loaded.step, loaded.common["training_state"]) == (2, {"skipped": 1})


def test_training_does_not_change_what_is_being_saved(tmp_path):
    """Prevents an asynchronous checkpoint that mixes steps because weights change in place."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4), data=2)
    run_ranks(plan.parallel, save_while_training, plan, tmp_path)
    [(tensors, common)], [(expected, expected_common)] = (
        run_ranks(Parallel(pipeline=1, data=1), content, checkpoint_path(tmp_path / way, 2))
        for way in ("async", "sync")
    )
    assert common == expected_common and len(tensors) > 100
    assert_equal_tensors(tensors, expected)


class _Stream:
    """A fake CUDA stream: runs the launched work in order at synchronize()."""

    def __init__(self):
        self.launched = []

    def synchronize(self):
        for work in self.launched:
            work()
        self.launched.clear()


class _DeviceTensor(torch.Tensor):
    """A fake CUDA tensor: its operations run when its stream synchronizes."""

    @staticmethod
    def __new__(cls, memory, stream):
        return torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, dtype=memory.dtype, device="cuda"
        )

    def __init__(self, memory, stream):
        self.memory, self.stream = memory, stream

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        [device] = {id(t.stream): t.stream for t in arguments if isinstance(t, cls)}.values()
        own = [t.memory if isinstance(t, cls) else t for t in arguments]
        name = operation._schema.name
        if name == "aten::clone":
            copied = torch.full_like(own[0], torch.nan)
            device.launched.append(lambda: copied.copy_(own[0]))
            return cls(copied, device)
        if name == "aten::_to_copy":  # synchronizes with the host
            device.synchronize()
            return own[0].clone()
        assert name in ("aten::copy_", "aten::add_"), name
        device.launched.append(lambda: operation(*own))
        return arguments[0]


def test_weights_on_a_device_are_written_as_they_were(tmp_path, monkeypatch):
    """Prevents asynchronous saves that fail on CUDA because torch writes from host memory, files of
    half-copied or next-step weights, and host memory that grows by rounded-up or repeated
    copies."""
    stream, locked, copies = _Stream(), [], {}
    monkeypatch.setattr(checkpoint, "has_cuda", lambda: True)
    monkeypatch.setattr(checkpoint, "_lock_pages", locked.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **of: empty(*shape, **of).fill_(torch.nan))
    values = torch.arange(12.0).view(3, 4)
    weight = _DeviceTensor(torch.zeros(3, 4), stream)
    weight.add_(values)  # the update is still queued in the stream
    data = TensorWriteData(TensorProperties.create_from_tensor(values), values.shape, None)
    item = WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR, tensor_data=data)
    path = tmp_path / "__0_0.distcp"
    bucket = (str(path), path.name, ([], [(item, weight)]))
    [copied] = checkpoint._copy_to_host([bucket], set(), copies)
    weight.add_(1000.0)  # training continues
    writer = SimpleNamespace(transforms=_StorageWriterTransforms())
    checkpoint._write_bucket(writer, copied)
    assert torch.equal(torch.load(path), values)
    stream.synchronize()
    assert torch.equal(weight.memory, values + 1000)
    [(_, _, (_, [(_, again)]))] = checkpoint._copy_to_host([bucket], set(), copies)
    assert again is copied[2][1][0][1] and torch.equal(again, values + 1000)
    assert [one.nbytes for one in locked] == [values.nbytes]  # no larger than the state


@pytest.mark.parametrize(
    ("changes", "beta", "messages"),
    [
        ({"hidden_size": 32}, 0.95, 2 * ["vision.hidden_size is 16 there and 32 in the plan"]),
        ({}, 0.5, [None, "adam_beta2 is 0.95 there and 0.5 given"]),
    ],
    ids=["model", "options"],
)
def test_checkpoints_of_another_run_are_refused(stopped_on, changes, beta, messages):
    """Prevents a load that half succeeds or fails with tensor shapes, and an option silently
    overruled by the checkpoint's value."""
    model = toy_model(**changes)
    plan, given = toy_plan(model, stages_of(model)), replace(OPTIONS, adam_beta2=beta)
    [told] = run_ranks(plan.parallel, refusals, plan, [stopped_on(1).checkpoint], given)
    for line, message in zip(told, messages, strict=True):
        assert line is None if message is None else message in line


@pytest.mark.parametrize("vision", [1.0, 0.5])
def test_other_rates_keep_weights_moments_and_position(stopped_on, vision):
    """Prevents new learning rates overruled by the checkpoint's, and lost moments or schedule
    position. An update is proportional to its rate."""
    half_run, lr = stopped_on(1), OPTIONS.lr / 2
    rates = {"lr": lr, "min_lr": OPTIONS.min_lr / 2, "vision_lr": vision * lr}
    load = half_run.checkpoint
    _, before = run_range(half_run.plan, 3, 3, load, None)
    _, usual = run_range(half_run.plan, 3, 4, load, None)
    _, lowered = run_range(half_run.plan, 3, 4, load, None, 3, replace(OPTIONS, **rates))
    for name, weight in before.items():
        share = 0.5 * (vision if name.startswith(("vision.", "vision_embedding.")) else 1.0)
        expected = weight + share * (usual[name] - weight)
        torch.testing.assert_close(lowered[name], expected, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (None, "holds no checkpoint"),
        ("seven", "must hold the step number"),
        ("7", "is not a whole checkpoint"),
    ],
)
def test_missing_and_broken_checkpoints_are_refused(tmp_path, tracker, message):
    """Prevents training from scratch if --load names a missing or broken checkpoint."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    if tracker is not None:
        checkpoint_path(tmp_path, 7).mkdir()
        (tmp_path / TRACKER_FILE).write_text(tracker)
    [told] = run_ranks(plan.parallel, refusals, plan, [tmp_path])
    assert all(message in line for line in told)
