"""Validation loss on held-out data, through the training pipeline."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import SeenBatches, Trainer, global_sums
from omnibal.job.runlog import ValidationRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """This data-parallel rank's held-out packs; may be empty."""

    batches: Callable[[], MicroBatchStream]
    """Function that reads the packs from the start, as this stage needs them."""
    slots: int = 0
    """Micro-batches of the rank, with empty ones to join other ranks."""


def validate(trainer: Trainer, validation: Validation, step: int) -> ValidationRecord:
    """Return the weighted mean loss over the held-out packs after `step` steps; collective."""
    started = time.perf_counter()
    seen = SeenBatches()
    batches = seen.count(trainer.joining(validation.batches(), validation.slots))
    with trainer.evaluating():
        losses = trainer.run_forward(batches)
    sums = global_sums(trainer.links, losses, seen)
    return ValidationRecord(
        step=step,
        loss=sums.mean_loss,
        loss_tokens=int(sums.loss_tokens),
        seconds=time.perf_counter() - started,
    )
