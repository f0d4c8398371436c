"""Training over a range of steps, with checkpoints."""

import resource
import signal
from dataclasses import asdict

import torch
from megatron.core import dist_checkpointing, parallel_state
from ranks import record_logs
from toy import OPTIONS, toy_batch

from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint, load_weights
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.job.runlog import checkpoint_path

TOTAL_STEPS = 6
PACKS = [[(2, 9), (0, 6)], [(0, 12)], [(1, 8)]]


def parts_of(trainer, options=OPTIONS):
    """Return a trainer's arguments for saving and loading checkpoints."""
    optimization = (trainer.optimizers, trainer.scheduler, asdict(options))
    return (trainer.plan, trainer.stages, *optimization)


def save(trainer, folder, step, options=OPTIONS):
    """Save synchronously; assert that ranks' states are consistent for core."""
    parts = parts_of(trainer, options)
    writer = CheckpointWriter(folder, *parts, keep_last=None, asynchronous=False)
    with (
        record_logs() as lines,
        record_logs("megatron.core.dist_checkpointing.validation") as differences,
    ):
        writer.save(step, {})
        writer.finish()
    assert lines == [f"saved {checkpoint_path(folder, step)}"]
    assert not differences


def train_range(links, plan, first, last, load, folder, seed=3, options=OPTIONS):
    """Return losses of steps first..last-1 and the final weights by global name."""
    trainer = build_trainer(plan, links, options, steps=TOTAL_STEPS, seed=seed)
    if load is not None:
        assert load_checkpoint(load, *parts_of(trainer, options)).step == first
    losses = []
    for step in range(first, last):
        batches = [toy_batch(plan.model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]
        own = batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
        losses.append(train_step(trainer, MicroBatchStream.of(own)).loss)
    trainer.wait_for_weights()
    if folder is not None:
        save(trainer, folder, last)
    weights = {
        global_parameter_name(trainer.stage, name): parameter.detach().clone()
        for name, parameter in trainer.stage.named_parameters()
    }
    return losses, weights


def refusals(links, plan, folders, options=OPTIONS, steps=TOTAL_STEPS):
    """Return the errors of `load_weights` and `load_checkpoint` per folder, None if loaded."""
    trainer = build_trainer(plan, links, options, steps=steps, seed=3)
    told = []
    for folder in folders:
        for load in (load_weights, load_checkpoint):
            parts = parts_of(trainer, options)
            try:
                load(folder, *parts if load is load_checkpoint else parts[:2])
                told.append(None)
            except UserError as error:
                told.append(str(error))
    return told


def content(links, path):
    """Return a checkpoint's tensors by name, and its common state."""
    loaded = dist_checkpointing.load_plain_tensors(str(path))
    tensors = {name: value for name, value in loaded.items() if torch.is_tensor(value)}
    return tensors, dist_checkpointing.load_common_state_dict(str(path))


def limit_file_size(size):
    """Make writes beyond `size` bytes of a file fail, without other effects; -1 lifts the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
