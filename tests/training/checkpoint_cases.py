"""Training that begins and ends at given steps."""

import resource
import signal
from dataclasses import asdict

from megatron.core import parallel_state
from ranks import logged
from toy import OPTIONS, toy_batch

from megatron.vlm.checkpoint.files import checkpoint_path
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step.train import build_trainer, train_step

TOTAL_STEPS = 6
PACKS = [[(2, 9), (0, 6)], [(0, 12)], [(1, 8)]]


def train_range(links, plan, first, last, load, save, seed=3):
    """Losses of steps first..last-1 and the weights after, by global name."""
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=seed)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    if load is not None:
        assert load_checkpoint(load, *parts).step == first
    losses = []
    for step in range(first, last):
        batches = [toy_batch(plan.model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]
        own = batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
        losses.append(train_step(trainer, MicroBatchStream.of(own)).loss)
    trainer.wait_for_weights()
    if save is not None:
        writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=False)
        with logged() as lines:
            writer.save(last, {})
            writer.finish()
        assert lines == [f"saved {checkpoint_path(save, last)}"]
    weights = {
        global_parameter_name(trainer.stage, name): parameter.detach().clone()
        for name, parameter in trainer.stage.named_parameters()
    }
    return losses, weights


def limit_file_size(size):
    """Writes beyond `size` bytes of a file fail; -1 lifts it. Nothing else of the process does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
