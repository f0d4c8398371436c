"""Many training steps with experts compared with a plain loop over Transformers' Qwen3-MoE."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from mixture_cases import plan_of
from qwen3_moe_cases import answer_losses, model_of, rename_tensors, transformers_model
from ranks import run_ranks
from tensor_parallel_cases import by_name
from toy import OPTIONS, ToySample, pack, toy_sample
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig

STEPS = 12
PACKS_PER_STEP = 4
# Text tokens of a pack's samples. Packs cycle through lengths, and repeat after seven.
LENGTHS = [(12, 7), (16,), (5, 6, 9), (21,), (8, 8)]
AUXILIARY_LOSS = 0.05


def packs_of(model: ModelConfig, step: int) -> list[list[ToySample]]:
    """Return samples of a step's packs."""
    return [
        [
            toy_sample(model, 0, tokens, seed=place % 7 + i)
            for i, tokens in enumerate(LENGTHS[place % len(LENGTHS)])
        ]
        for place in range(PACKS_PER_STEP * step, PACKS_PER_STEP * (step + 1))
    ]


def train_ours(links, plan: Plan):
    """Return first weights by name, and loss, gradient norm and rate of every step."""
    trainer = build_trainer(plan, links, OPTIONS, steps=STEPS, seed=4)
    weights = by_name(trainer.stage, lambda parameter: parameter)
    share = PACKS_PER_STEP // plan.parallel.data
    first = dist.get_rank() * share
    results = []
    for step in range(STEPS):
        own = packs_of(plan.model, step)[first : first + share]
        result = train_step(trainer, MicroBatchStream.of([pack(samples) for samples in own]))
        results.append((result.loss, result.grad_norm, result.learning_rate))
    return weights, results


def plain_loop(links, model: ModelConfig, tensors: dict[str, torch.Tensor], rates: list[float]):
    """Return loss and gradient norm of every step of Transformers' model under torch's AdamW."""
    theirs = transformers_model(model, tensors)
    groups = [
        {"params": [value], "weight_decay": OPTIONS.weight_decay * (value.dim() > 1)}
        for value in theirs.parameters()
    ]
    betas = (OPTIONS.adam_beta1, OPTIONS.adam_beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=OPTIONS.adam_eps)
    results = []
    for step, rate in enumerate(rates):
        packs = [pack_losses(theirs, samples) for samples in packs_of(model, step)]
        weight = sum(len(losses_L) for losses_L, _ in packs)
        loss = sum(losses_L.sum() for losses_L, _ in packs) / weight
        balance = sum(len(losses_L) * balance for losses_L, balance in packs) / weight
        optimizer.zero_grad()
        (loss + AUXILIARY_LOSS * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIONS.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def pack_losses(theirs, samples: Sequence[ToySample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses of a pack's answers, and its load-balancing loss summed over layers."""
    found = [answer_losses(theirs, sample, output_router_logits=True) for sample in samples]
    logits = [output.router_logits for _, output in found]
    experts, chosen = theirs.config.num_experts, theirs.config.num_experts_per_tok
    # Transformers' loss grows with experts per token, over the tokens of all layers.
    balance = sum(
        load_balancing_loss_func((torch.cat(layer),), experts, chosen) / chosen
        for layer in zip(*logits, strict=True)
    )
    return torch.cat([losses_L for losses_L, _ in found]), balance


def test_equals_a_plain_loop():
    """Prevents expert moments lost or missharded, and other rates or weight decays for experts."""
    model = model_of(normalized=True, auxiliary_loss=AUXILIARY_LOSS)
    plan = plan_of(model=model, data=2, expert=2)
    (weights, found), _ = run_ranks(plan.parallel, train_ours, plan)
    rates = [rate for _, _, rate in found]
    as_one_process = plan_of().parallel
    [expected] = run_ranks(as_one_process, plain_loop, model, rename_tensors(model, weights), rates)
    assert [loss for loss, _, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm in expected], rel=1e-3)
    assert found[-1][0] < 0.9 * found[0][0]  # the weights have learned
