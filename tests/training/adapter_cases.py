"""A run that trains adapters on a released model, its exported adapters and its outputs."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from conversion_cases import Computed, keep, micro_batches, model_of
from ranks import run_ranks
from released import KINDS, imported, save_released, transformers_model
from tensor_parallel_cases import by_name
from toy import OPTIONS, cut_plan, pack

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_weights
from megatron.vlm.conversion.adapter_files import export_adapter
from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig

EVERYWHERE = AdapterConfig(rank=4, alpha=12, parts=("vision", "projector", "language"))
FAST = replace(OPTIONS, lr=0.05, min_lr=0.05, clip_grad=0.0)
"""A rate that moves adapters far in few steps."""


def plan_of(name: str, adapters: AdapterConfig | None) -> Plan:
    others = set() if adapters is None else {"vision", "projector", "language"} - {*adapters.parts}
    return cut_plan(model_of(name), adapters=adapters, frozen=tuple(sorted(others)))


def _load_and_step(links, plan: Plan, run: Path, save: Path | None) -> Computed:
    """Return a run's logits, loss and gradients; save a checkpoint after more steps in `save`."""
    trainer = build_trainer(plan, links, FAST, steps=9, seed=9)
    load_weights(run, plan, trainer.stages)
    for optimizer in trainer.optimizers:
        optimizer.reload_model_params()
    logits: list[torch.Tensor] = []
    trainer.stage.head.register_forward_hook(lambda *given: keep(logits, *given))
    batches = [pack(samples) for samples in micro_batches(plan.model)]
    result = train_step(trainer, MicroBatchStream.of(batches))
    gradients = by_name(trainer.stage, lambda parameter: parameter.main_grad)
    if save is not None:
        for _ in range(4):
            train_step(trainer, MicroBatchStream.of(batches))
        parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(FAST))
        writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=False)
        writer.save(5, {})
        writer.finish()
    words = plan.model.language.vocab_size
    seen = [each.squeeze(1)[:, :words] for each in logits[: len(batches)]]
    return Computed(logits_LW=seen, loss=result.loss, gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Folders of a run with adapters, and of its sources."""

    released: Path
    imported: Path
    run: Path
    adapter: Path


def train_adapters(name: str, adapters: AdapterConfig, folder: Path) -> Trained:
    """Import a released model, train adapters and export them."""
    source = save_released(transformers_model(KINDS[name]), folder / "released", "stacked")
    begun, run = imported(source, folder / "imported"), folder / "run"
    plan = plan_of(name, adapters)
    run_ranks(plan.parallel, _load_and_step, plan, begun, run)
    export_adapter(open_newest(run), TensorLayout.TRANSFORMERS, folder / "adapter", str(source))
    return Trained(released=source, imported=begun, run=run, adapter=folder / "adapter")


def compute_run(name: str, adapters: AdapterConfig | None, run: Path) -> Computed:
    """Return logits, loss and gradients of a run's weights."""
    plan = plan_of(name, adapters)
    return run_ranks(plan.parallel, _load_and_step, plan, run, None)[0]


def max_difference(found: Computed, expected: Computed) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    pairs = list(zip(found.logits_LW, expected.logits_LW, strict=True))
    off = max((own - other).abs().max().item() for own, other in pairs)
    return off / max(other.abs().max().item() for _, other in pairs)
