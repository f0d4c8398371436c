"""A run of adapters on a released model: trained, its adapters exported, and what it computes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from conversion_cases import keep, micro_batches, model_of, predicting_positions
from ranks import run_ranks
from released import KINDS, imported, save_released, transformers_model
from tensor_parallel_cases import by_name
from toy import OPTIONS, pack, stages_of, toy_plan

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_weights
from megatron.vlm.conversion.adapter_files import export_adapter
from megatron.vlm.conversion.tensor_map import Layout
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.adapters import AdapterConfig

EVERYWHERE = AdapterConfig(rank=4, alpha=12, parts=("vision", "projector", "language"))
FAST = replace(OPTIONS, lr=0.05, min_lr=0.05, clip_grad=0.0)
"""Few steps that move adapters far."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Logits of every micro-batch, their loss, and gradients by name."""

    logits_LW: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def plan_of(name: str, adapters: AdapterConfig | None) -> Plan:
    model = model_of(name)
    plan = toy_plan(model, stages_of(model))
    others = set() if adapters is None else {"vision", "projector", "language"} - {*adapters.parts}
    return plan.model_copy(update={"adapters": adapters, "frozen": tuple(sorted(others))})


def _stepped(links, plan: Plan, run: Path, save: Path | None) -> Computed:
    """What the weights of a run compute, and after a step or more its checkpoint in `save`."""
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
    """Folders of a run with adapters and of what it began with."""

    released: Path
    imported: Path
    run: Path
    adapter: Path


def trained(name: str, adapters: AdapterConfig, folder: Path) -> Trained:
    """Import a released model, train adapters beside it and export them."""
    source = save_released(transformers_model(KINDS[name]), folder / "released", "stacked")
    begun, run = imported(source, folder / "imported"), folder / "run"
    plan = plan_of(name, adapters)
    run_ranks(plan.parallel, _stepped, plan, begun, run)
    export_adapter(open_newest(run), Layout.TRANSFORMERS, folder / "adapter", str(source))
    return Trained(released=source, imported=begun, run=run, adapter=folder / "adapter")


def computed_here(name: str, adapters: AdapterConfig | None, run: Path) -> Computed:
    """What a run's weights compute here."""
    plan = plan_of(name, adapters)
    return run_ranks(plan.parallel, _stepped, plan, run, None)[0]


def computed_by(model: torch.nn.Module, name: str) -> Computed:
    """What a model of Transformers computes, sample by sample, with gradients of what it trains."""
    logits, losses = [], []
    for samples in micro_batches(model_of(name)):
        logits.append([])
        for sample in samples:
            ids = torch.tensor(sample.ids)
            out = model(
                input_ids=ids.unsqueeze(0),
                pixel_values=sample.pixels_TCPP if len(sample.pixels_TCPP) else None,
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            )
            asked = predicting_positions(sample)
            logits[-1].append(out.logits[0, asked])
            losses.append(F.cross_entropy(logits[-1][-1], ids[asked + 1], reduction="none"))
    loss = torch.cat(losses).mean()
    if loss.requires_grad:
        loss.backward()
    return Computed(
        logits_LW=[torch.cat(each).detach() for each in logits],
        loss=loss.item(),
        gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def farthest(found: Computed, expected: Computed) -> float:
    """Largest difference of logits, over the largest of them."""
    pairs = list(zip(found.logits_LW, expected.logits_LW, strict=True))
    off = max((own - other).abs().max().item() for own, other in pairs)
    return off / max(other.abs().max().item() for _, other in pairs)
