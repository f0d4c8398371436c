"""Stopping and resuming: the same weights as if nothing had happened."""

import functools
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import PACKS, TOTAL_STEPS, train_range
from megatron.core import dist_checkpointing, parallel_state
from ranks import logged, run_ranks
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint import save_load as checkpoint
from megatron.vlm.checkpoint.files import TRACKER_FILE, checkpoint_path, latest_step, part_path
from megatron.vlm.checkpoint.save_load import (
    CheckpointWriter,
    LoadedCheckpoint,
    load_checkpoint,
    load_weights,
)
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.model.parallel import Parallel


def run_range(plan, *arguments, **options):
    ranks = run_ranks(plan.parallel, train_range, plan, *arguments, **options)
    weights = {name: value for _, own in ranks for name, value in own.items()}
    return ranks[0][0], weights


@dataclass(frozen=True)
class Stopped:
    """A run that was left alone, and one that was stopped and saved after half of its steps."""

    plan: Plan
    losses: list[float]
    weights: dict[str, torch.Tensor]
    first_losses: list[float]
    checkpoint: Path


@pytest.fixture(scope="module")
def stopped_on(tmp_path_factory):
    """A run of two stages, by its number of pipelines; its checkpoint is not to be written to."""

    @functools.cache
    def stopped(pipelines):
        model, folder = toy_model(), tmp_path_factory.mktemp("stopped")
        plan = toy_plan(model, stages_of(model, 4), data=pipelines)
        losses, weights = run_range(plan, 0, TOTAL_STEPS, None, None)
        first, _ = run_range(plan, 0, 3, None, folder)
        return Stopped(plan, losses, weights, first, folder)

    return stopped


@pytest.mark.parametrize("pipelines", [1, 2])
def test_resumed_equals_uninterrupted_bit_for_bit(stopped_on, pipelines):
    """Prevents: optimizer, schedule or weights that a checkpoint does not bring back exactly."""
    stopped = stopped_on(pipelines)
    assert latest_step(stopped.checkpoint) == 3
    rest, resumed = run_range(stopped.plan, 3, TOTAL_STEPS, stopped.checkpoint, None)
    assert stopped.first_losses + rest == stopped.losses
    assert stopped.weights.keys() == resumed.keys()
    for name in stopped.weights:
        assert torch.equal(resumed[name], stopped.weights[name]), name


SPLITS = {
    "one-stage": ((), 1),
    "other-cut": ((8,), 1),
    "four-stages": ((2, 4, 7), 1),
    "two-of-one-stage": ((), 2),
}


# The number of pipelines before, and what comes after.
RESUMES = [(1, "four-stages"), (1, "two-of-one-stage"), (2, "one-stage"), (2, "other-cut")]


@pytest.mark.parametrize(("pipelines", "split"), RESUMES)
def test_resumes_under_another_split(stopped_on, pipelines, split):
    """Prevents: a checkpoint that only the split that wrote it can read."""
    stopped, (cuts, data) = stopped_on(pipelines), SPLITS[split]
    model = stopped.plan.model
    other = toy_plan(model, stages_of(model, *cuts), data=data)
    losses, resumed = run_range(other, 3, TOTAL_STEPS, stopped.checkpoint, None)
    assert losses == pytest.approx(stopped.losses[3:], rel=1e-5)
    for name, expected in stopped.weights.items():
        torch.testing.assert_close(resumed[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("frozen", ["vision", "language"])
def test_resumes_where_a_whole_stage_is_frozen(tmp_path, frozen):
    """Prevents: optimizer settings lost because the stage that stores them trains nothing."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 3 if frozen == "vision" else 8))
    plan = plan.model_copy(update={"frozen": (frozen,)})
    losses, weights = run_range(plan, 0, TOTAL_STEPS, None, None)
    first, _ = run_range(plan, 0, 3, None, tmp_path)
    rest, resumed = run_range(plan, 3, TOTAL_STEPS, tmp_path, None)
    assert first + rest == losses
    for name in weights:
        assert torch.equal(resumed[name], weights[name]), name


def saved_while_training(links, plan, directory):
    """Saves after step 2 in both ways, and no byte is written before step 5 is done."""
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=3)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
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
        with logged() as lines:
            later.poll()
        assert lines == []
    assert list(part_path(directory / "async", 2).iterdir()) == []
    assert latest_step(directory / "async") is None
    dist.barrier()
    gate.set()
    with logged() as lines:
        later.finish()
    assert lines == [f"saved {checkpoint_path(directory / 'async', 2)}"]
    assert load_checkpoint(directory / "async", *parts) == LoadedCheckpoint(
        step=2, training_state={"skipped": 1}
    )


def content(links, path):
    loaded = dist_checkpointing.load_plain_tensors(str(path))
    tensors = {name: value for name, value in loaded.items() if torch.is_tensor(value)}
    return tensors, dist_checkpointing.load_common_state_dict(str(path))


def test_training_does_not_change_what_is_being_saved(tmp_path):
    """Prevents: a checkpoint mixed of several steps, as weights change in place."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4), data=2)
    run_ranks(plan.parallel, saved_while_training, plan, tmp_path)
    [(tensors, common)], [(expected, expected_common)] = (
        run_ranks(Parallel(pipeline=1, data=1), content, checkpoint_path(tmp_path / way, 2))
        for way in ("async", "sync")
    )
    assert common == expected_common
    assert tensors.keys() == expected.keys() and len(tensors) > 100
    for name in expected:
        assert torch.equal(tensors[name], expected[name]), name


class _Stream:
    """Work of a fake device in the order it was launched, done when somebody waits."""

    def __init__(self):
        self.launched = []

    def synchronize(self):
        for work in self.launched:
            work()
        self.launched.clear()


class _DeviceTensor(torch.Tensor):
    """Says that it is on a CUDA device; what is done with it happens when its stream gets there."""

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
        if name == "aten::_to_copy":  # the host waits for it
            device.synchronize()
            return own[0].clone()
        assert name in ("aten::copy_", "aten::add_"), name
        device.launched.append(lambda: operation(*own))
        return arguments[0]


def test_weights_on_a_device_are_written_as_they_were(tmp_path, monkeypatch):
    """Prevents: asynchronous saves that fail on CUDA, as torch writes from the host alone, and
    files of weights that were half copied or already those of the next step."""
    stream, pinned = _Stream(), []
    monkeypatch.setattr(checkpoint, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    empty = torch.empty

    def host_memory(*shape, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*shape, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", host_memory)
    values = torch.arange(12.0).view(3, 4)
    weight = _DeviceTensor(torch.zeros(3, 4), stream)
    weight.add_(values)  # the update before the save is still in the stream
    data = TensorWriteData(TensorProperties.create_from_tensor(values), values.shape, None)
    item = WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR, tensor_data=data)
    path = tmp_path / "__0_0.distcp"
    [copied] = checkpoint._on_host([(str(path), path.name, ([], [(item, weight)]))], set())
    weight.add_(1000.0)  # training goes on
    writer = SimpleNamespace(transforms=_StorageWriterTransforms())
    checkpoint._write_bucket(writer, copied)
    assert pinned == [True]
    assert torch.equal(torch.load(path), values)
    stream.synchronize()
    assert torch.equal(weight.memory, values + 1000)


def refusal(links, plan, load):
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=0)
    with pytest.raises(UserError) as caught:
        load_weights(load, plan, trainer.stages)
    return str(caught.value)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    """Prevents: a load that half succeeds, or fails deep inside with tensor shapes."""
    model = toy_model()
    run_range(toy_plan(model, stages_of(model)), 0, 1, None, tmp_path)
    wider = toy_model(hidden_size=32)
    [message] = run_ranks(
        toy_plan(wider, stages_of(wider)).parallel,
        refusal, toy_plan(wider, stages_of(wider)), tmp_path,
    )  # fmt: skip
    assert "vision.hidden_size is 16 there and 32 in the plan" in message


def refused_options(links, plan, load):
    options = replace(OPTIONS, lr=5e-3)
    trainer = build_trainer(plan, links, options, steps=TOTAL_STEPS, seed=0)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(options))
    with pytest.raises(UserError) as caught:
        load_checkpoint(load, *parts)
    return str(caught.value)


def test_resuming_with_other_options_is_refused(tmp_path):
    """Prevents: a learning rate that is given and silently overruled by the checkpoint's."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    run_range(plan, 0, 1, None, tmp_path)
    [message] = run_ranks(plan.parallel, refused_options, plan, tmp_path)
    assert "lr is 0.01 there and 0.005 given" in message


def test_missing_and_broken_checkpoints_are_refused(tmp_path):
    """Prevents: training from scratch when a checkpoint was asked for."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "holds no checkpoint" in message
    (tmp_path / TRACKER_FILE).write_text("seven")
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "must hold the step number" in message
    (tmp_path / TRACKER_FILE).write_text("7")
    checkpoint_path(tmp_path, 7).mkdir()
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "is not a whole checkpoint" in message
