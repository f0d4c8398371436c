"""A checkpoint of some GiB: PYTHONPATH=. python tests/training/large_checkpoint.py FOLDER GIB

Saves it during training, resumes, and prints the times as JSON.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from cuda_checks import join
from toy import OPTIONS, cut_plan, pack, toy_sample, toy_text_model

from megatron.vlm.backend import current_device
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import Trainer, build_trainer, train_step

PARAMETER_BYTES = 14
"""Nominal: a weight in bf16, and in float32 with two moments."""
LAYERS = 8


def step(trainer: Trainer) -> float:
    sample = toy_sample(trainer.plan.model, 0, 64, seed=0)
    return train_step(trainer, MicroBatchStream.of([pack([sample]).to(current_device())])).loss


def main(folder: Path, gib: float) -> None:
    # A layer has 16 * width**2 parameters.
    width = 64 * max(round((gib * 2**30 / PARAMETER_BYTES / LAYERS / 16) ** 0.5 / 64), 1)
    model = toy_text_model(
        layers=LAYERS, hidden_size=width, heads=width // 64, kv_heads=width // 64,
        ffn_hidden_size=4 * width,
    )  # fmt: skip
    plan = cut_plan(model).model_copy(update={"precision": "bf16"})
    links, options = join(), asdict(OPTIONS)
    trainers = [build_trainer(plan, links, OPTIONS, steps=9, seed=seed) for seed in (3, 4)]
    first, second = ((plan, one.stages, one.optimizers, one.scheduler, options) for one in trainers)
    step(trainers[0])
    writer = CheckpointWriter(folder, *first, keep_last=None, asynchronous=True)
    start_s = time.perf_counter()
    writer.save(1, {})
    held_s = time.perf_counter() - start_s
    losses = [step(trainers[0])]
    writer.finish()
    saved_s = time.perf_counter() - start_s
    assert not writer.failures, writer.failures
    start_s = time.perf_counter()
    assert load_checkpoint(folder, *second).step == 1
    loaded_s = time.perf_counter() - start_s
    losses.append(step(trainers[1]))
    assert losses[0] == losses[1], losses
    parameters = sum(one.numel() for one in trainers[0].stage.parameters())
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    figures = {
        "stated_gib": parameters * PARAMETER_BYTES / 2**30, "written_gib": written / 2**30,
        "training_held_s": held_s, "saved_s": saved_s, "loaded_s": loaded_s,
    }  # fmt: skip
    if torch.cuda.is_available():
        figures["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
