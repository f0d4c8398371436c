"""Mixture of experts with expert parallelism, compared with one process and across sizes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from mixture_cases import MODEL, model_of, plan_of
from ranks import run_ranks
from tensor_parallel_cases import OPTIONS, batches_of, compare_resumed, compare_with_one_process

from megatron.vlm.checkpoint.identity import architecture_differences
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model import deferred_weights, experts
from megatron.vlm.model.experts import take_expert_balance
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.check import model_obstacle
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun

# Packs as (tiles, text tokens): token counts that do not divide, a pack without images, and a pack
# with tokens without loss.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 7)], [(0, 12), (0, 2)], [(1, 2)], [(0, 5), (2, 9)]],
]
# Dealt in turn: a rank without a pack, with a pack less, and several packs per pipeline.
UNEVEN = [[[(1, 8)]], [[(2, 9)], [(0, 12)], [(1, 6), (0, 4)]], [[(0, 21)], [(2, 8)], [(0, 7)]]]
IN_PARTS = {"tensor": 2, "sequence_parallel": True}
# Units: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed, 5-7 language layers.
PLANS = {
    "experts-4": (plan_of(data=4, expert=4), STEPS),
    "experts-2-of-data-4": (plan_of(data=4, expert=2), STEPS),
    "pipeline-recomputed": (plan_of(6, data=2, expert=2, recompute=(0, 2)), STEPS),
    "tensor-data-experts": (plan_of(**IN_PARTS, data=2, expert=4), STEPS),
    "tensor-pipeline": (plan_of(5, **IN_PARTS, expert=2), STEPS),
    "uneven-experts-2-of-data-4": (plan_of(data=4, expert=2), UNEVEN),
    "uneven-pipeline": (plan_of(6, data=2, expert=2, recompute=(0, 2)), UNEVEN),
    "uneven-tensor-experts-4": (plan_of(**IN_PARTS, data=2, expert=4), UNEVEN),
}


@pytest.mark.parametrize(("plan", "steps"), PLANS.values(), ids=PLANS)
def test_same_training_as_one_process(plan, steps):
    """Prevents parallel sizes that change routing, gradients, auxiliary loss or norm, deadlock of a
    rank without a pack, and empty packs that count."""
    compare_with_one_process(plan, steps, rel=2e-5)


def test_buckets_of_experts_and_of_all_else_are_exchanged_in_one_order(small_buckets):
    """Prevents gradients reduced too early, and forwards that do not wait for weights."""
    compare_with_one_process(plan_of(data=4, expert=2), UNEVEN, rel=2e-5)


RESUMES = {
    "one-to-experts-2-of-another-margin": (
        plan_of(), plan_of(data=2, expert=2, model=model_of(imbalance=2.0)),
    ),
    "pipeline-to-tensor": (plan_of(2, data=2, expert=2), plan_of(**IN_PARTS, expert=2)),
    "tensor-experts-4-to-data": (plan_of(**IN_PARTS, data=2, expert=4), plan_of(data=2)),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), RESUMES.values(), ids=RESUMES)
def test_resumes_under_another_expert_size(tmp_path, before, after):
    """Prevents checkpoints with experts or moments that fit one expert-parallel size."""
    compare_resumed(tmp_path, (before, 1), (after, 1), steps=STEPS, rel=2e-5)


@pytest.mark.in_own_process
def test_an_expert_without_tokens_has_no_gradient(monkeypatch):
    """Prevents uninitialized memory as an idle expert's gradient, as on Blackwell devices."""
    multiply = F.grouped_mm

    def leave_empty_groups(first, second, offs):
        results = multiply(first, second, offs=offs)
        if results.dim() == 3:
            results[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return results

    counts, weight = (0, 5, 0, 3), torch.randn(4, 16, 8, dtype=torch.bfloat16)
    weight.requires_grad_()
    rows, gradient = (torch.randn(8, width, dtype=torch.bfloat16) for width in (8, 16))
    product = experts.GroupedProduct(counts)
    deferred_weights.multiply(product, rows, weight).backward(gradient)
    monkeypatch.setattr(experts, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", leave_empty_groups)
    expected, weight.grad = weight.grad, None
    deferred_weights.multiply(product, rows, weight).backward(gradient)
    late = torch.zeros(4, 16, 8)
    product.add_weight_gradient(rows, gradient, late)
    for found in (weight.grad, late.bfloat16()):
        torch.testing.assert_close(found, expected)
        assert not found[[0, 2]].any() and found[[1, 3]].all()


def test_choices_for_experts_are_no_other_model():
    """Prevents refusing a resume with another margin or auxiliary loss; accepting other experts."""
    chosen = model_of(imbalance=2.0, auxiliary_loss=0.0)
    assert architecture_differences(MODEL, chosen) == []
    [line] = architecture_differences(MODEL, model_of(experts=4))
    assert line.startswith("language.runs is ") and "'experts': 8" in line


def routed_tokens(links, plan, packs):
    """Return a step's expert balance, and the balance read a second time."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    batches = list(batches_of(plan.model, 0, packs))
    own = batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
    result = train_step(trainer, MicroBatchStream.of(own))
    return result.experts, take_expert_balance(trainer.chunks, plan.parallel)


def test_balance_is_told_of_once_and_without_padding():
    """Prevents recomputed layers counted twice, padding that counts, and missing ranks."""
    [(expected, again)] = run_ranks(plan_of().parallel, routed_tokens, plan_of(), STEPS[0])
    assert expected.fullest_expert > expected.fullest_rank == 1
    assert again.fullest_expert == 1
    plan = plan_of(6, **IN_PARTS, expert=2, recompute=(0, 1, 2))
    for balance, _ in run_ranks(plan.parallel, routed_tokens, plan, STEPS[0]):
        assert balance.fullest_expert == pytest.approx(expected.fullest_expert, rel=1e-6)
        assert 1 < balance.fullest_rank < balance.fullest_expert


def auxiliary_gradients(links, loss_weight):
    """Return the last router's gradient without loss tokens, and the gradient by definition."""
    stage = build_trainer(plan_of(), links, OPTIONS, steps=10, seed=3).stage
    layer = stage.language.layers[-1]
    batch = next(batches_of(MODEL, 0, STEPS[0]))
    none_L = torch.zeros(len(batch.labels_L))
    batch = replace(batch, loss_weight=loss_weight, loss_weights_L=none_L)
    inputs = []
    layer.mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach()))
    stage.set_input_tensor(None)
    stage(batch).backward()
    weight_EH = layer.mlp.router.weight.detach().clone().requires_grad_()
    scores_SE = (inputs[0].flatten(0, 1) @ weight_EH.t()).softmax(-1)
    chosen_SK = scores_SE.topk(2).indices
    shares_E = torch.bincount(chosen_SK.flatten(), minlength=8) / chosen_SK.numel()
    loss = loss_weight * 0.5 * 8 * (shares_E * scores_SE.mean(0)).sum()
    return layer.mlp.router.weight.main_grad, torch.autograd.grad(loss, weight_EH)[0]


def test_auxiliary_loss_is_switch_transformers():
    """Prevents an auxiliary loss scaled differently from its coefficient."""
    [(found, expected)] = run_ranks(plan_of().parallel, auxiliary_gradients, 3.0)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def mixture_outputs(links, model):
    """Return inputs and outputs of the first mixture of experts, and its weights."""
    stage = build_trainer(plan_of(model=model), links, OPTIONS, steps=1, seed=3).stage
    layer = stage.language.layers[0].mlp
    seen = []
    layer.register_forward_hook(lambda _, given, output: seen.append((given[0], output[0])))
    stage.set_input_tensor(None)
    stage(next(batches_of(model, 0, STEPS[0])))
    [(given, output)] = seen
    tensors = (given.flatten(0, 1), output.flatten(0, 1), *layer.parameters())
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "sigmoid", "weight_factor": 2.5},
        {"normalized": False, "weight_factor": 3.0, "experts_per_token": 3},
        {"normalized": False, "experts_per_token": 1},
    ],
    ids=["sigmoid", "not-normalized", "one-expert"],
)
def test_every_token_is_the_sum_of_its_experts(changes):
    """Prevents routing scores that differ from the model file, or a forgotten weight factor."""
    model = model_of(**changes)
    experts = model.language.kinds[0].experts
    [(given_SH, output_SH, router_EH, first, second)] = run_ranks(
        plan_of().parallel, mixture_outputs, model
    )
    logits_SE = given_SH @ router_EH.t()
    scores_SE = logits_SE.sigmoid() if experts.score == "sigmoid" else logits_SE.softmax(-1)
    chosen_SE = scores_SE >= scores_SE.topk(experts.experts_per_token).values[:, -1:]
    weights_SE = experts.weight_factor * scores_SE * chosen_SE
    if experts.normalized:
        weights_SE /= (scores_SE * chosen_SE).sum(-1, keepdim=True)
    # Output of every expert for every token.
    gate_SEF, value_SEF = torch.einsum("sh,efh->sef", given_SH, first).chunk(2, -1)
    all_SEH = torch.einsum("sef,ehf->seh", F.silu(gate_SEF) * value_SEF, second)
    expected_SH = (weights_SE.unsqueeze(-1) * all_SEH).sum(1)
    torch.testing.assert_close(output_SH, expected_SH, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([{"selection_bias": True, "score": "sigmoid"}], "selection_bias"),
        ([{"score": "sigmoid", "normalized": False}], "not normalized"),
        ([{"experts_per_token": 1}], "one expert a token"),
        ([None, {}], "together"),
    ],
)
def test_what_is_not_trained_is_named(runs, named):
    """Prevents training experts with unsupported settings as if they were supported."""
    sizes = {"experts": 8, "experts_per_token": 2, "ffn_hidden_size": 10}
    experts = [None if one is None else ExpertsConfig(**{**sizes, **one}) for one in runs]
    own = tuple(LayerRun(layers=1, experts=one) for one in experts)
    assert named in model_obstacle(MODEL.with_tower("language", runs=own))
    assert model_obstacle(MODEL) is None
