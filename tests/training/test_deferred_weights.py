"""Split backwards (zb-h1) compared with whole backwards, on equal stages and micro-batches."""

from typing import NamedTuple

import mixture_cases
import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from overlap_cases import STEPS as UNEVEN_STEPS
from ranks import run_ranks
from tensor_parallel_cases import MODELS, OPTIONS, STEPS, TIED, assert_same_training, train_steps
from toy import stages_of, toy_batch, toy_plan

from megatron.vlm.model.deferred_weights import DeferredWeights
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.schedule import run_backward
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule

MODEL = MODELS["300M-like"]
IN_TWO_PARTS = PipelineSchedule(name="zb-h1")
IN_PARTS = {"tensor": 2, "sequence_parallel": True}
RECOMPUTE = {"vision": (0,), "language": (0, 1)}
ADAPTERS = AdapterConfig(rank=4, alpha=8, parts=("language",))


class Case(NamedTuple):
    """A plan and its training options."""

    plan: Plan
    steps: list = STEPS
    adds_up: bool = False
    """Whether weight gradients are accumulated by the fused kernel."""


def toy(*cuts, model=MODEL, recompute=None, frozen=(), adapters=None, **sizes):
    plan = toy_plan(model, stages_of(model, *cuts, **(recompute or {})), **sizes)
    return plan.model_copy(update={"frozen": frozen, "adapters": adapters})


# Units: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed, 5-6 language layers,
# 7 head.
CASES = {
    "pp2": Case(toy(5)),
    "pp4-recomputed": Case(toy(2, 4, 6, recompute=RECOMPUTE)),
    "pp2-tp2-sp-fused": Case(toy(5, **IN_PARTS), adds_up=True),
    "pp2-tied-apart": Case(toy(6, model=TIED)),
    "pp2-dp2-uneven": Case(toy(5, data=2, recompute=RECOMPUTE), steps=UNEVEN_STEPS),
    "pp2-ep2-dp2": Case(mixture_cases.plan_of(6, data=2, expert=2, recompute=(0, 2))),
    "pp2-frozen-encoder": Case(toy(5, frozen=("vision",))),
    "pp2-frozen-language": Case(toy(5, frozen=("language",))),
    "pp2-adapters": Case(toy(5, adapters=ADAPTERS, recompute=RECOMPUTE)),
}


def in_two_parts(plan):
    return plan.model_copy(update={"schedule": IN_TWO_PARTS})


def train_case(case, schedule):
    plan = case.plan.model_copy(update={"schedule": schedule})
    with pytest.MonkeyPatch.context() as monkeypatch:
        fuses = "megatron.vlm.model.configs.fuses_weight_gradients"
        monkeypatch.setattr(fuses, lambda: case.adds_up)
        return run_ranks(plan.parallel, train_steps, plan, case.steps)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_whole_backwards(small_buckets, name):
    """Prevents weight gradients lost, counted twice, of another micro-batch, reduced before they
    are complete, or summed in another order than whole backwards."""
    case = CASES[name]
    whole, split = train_case(case, ONE_FORWARD_ONE_BACKWARD), train_case(case, IN_TWO_PARTS)
    for (results, gradients, weights), expected in zip(split, whole, strict=True):
        assert results == expected[0]
        for got, one in zip([*gradients, weights], [*expected[1], expected[2]], strict=True):
            assert got.keys() == one.keys()
            assert [name for name in one if not torch.equal(got[name], one[name])] == []


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"data": 2}], ids=["alone", "tp2", "dp2"])
def test_matrix_of_embedding_and_head_in_one_stage(small_buckets, sizes):
    """Prevents a tied matrix that misses one of two gradients, or is reduced before both."""
    plan = toy(3, model=TIED, **sizes)
    [reference] = train_case(Case(toy(model=TIED)), ONE_FORWARD_ONE_BACKWARD)
    assert_same_training(train_case(Case(plan), IN_TWO_PARTS), plan, reference)


def parts_of_backward(links, plan, sample):
    """Return whether the first part, and both parts, leave a gradient, by parameter; and bytes of
    the input and output gradient kept between the parts, by weight."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    names = {parameter: name for name, parameter in trainer.stage.named_parameters()}
    trainer.zero_gradients()
    run_backward([(trainer.models[0](toy_batch(plan.model, [sample], seed=1)), None)])

    def has_gradient():
        return {
            name: bool(parameter.main_grad.any())
            for parameter, name in names.items()
            if parameter.requires_grad
        }

    first, late = has_gradient(), trainer.stage.deferred.take()
    kept = {
        names[one.weight]: tuple(x.untyped_storage().nbytes() for x in (one.rows, one.gradient))
        for one in late
    }
    trainer.stage.deferred.add(late, is_last=False)
    return first, has_gradient(), kept


def test_first_part_leaves_all_products_for_weights():
    """Prevents weight products in the first part, which the previous stage waits for."""
    plan = in_two_parts(toy(recompute=RECOMPUTE))
    [(first, both, _)] = run_ranks(plan.parallel, parts_of_backward, plan, (2, 9))
    assert all(both.values())
    late = {name for name, is_there in first.items() if not is_there}
    linears = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "head")
    assert late == {name for name in first if name.endswith(tuple(f"{x}.weight" for x in linears))}


def test_adapters_and_frozen_linears_leave_nothing():
    """Prevents inputs kept for weight products that never run, or that are cheap (adapters)."""
    adapted = in_two_parts(toy(adapters=ADAPTERS, frozen=("vision", "projector")))
    [(first, both, kept)] = run_ranks(adapted.parallel, parts_of_backward, adapted, (2, 9))
    assert kept == {}
    assert first == both


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, IN_PARTS], ids=["alone", "tp2", "tp2-sp"])
def test_what_is_kept_between_the_parts_is_as_documented(sizes):
    """Prevents keeping all ranks' sequence parts, or storages larger than the product's inputs."""
    plan = in_two_parts(toy(**sizes))
    [(*_, kept), *_] = run_ranks(plan.parallel, parts_of_backward, plan, (2, 9))
    vision, language, parts = MODEL.vision, MODEL.language, plan.parallel.tensor
    tokens = 2 * vision.tokens_per_item + 9
    own = (tokens + 1) // 2 if "sequence_parallel" in sizes else tokens
    tokens = own * parts if "sequence_parallel" in sizes else tokens
    heads, hidden = language.heads * language.head_width // parts, language.hidden_size
    qkv = heads + 2 * language.kv_heads * language.head_width // parts
    inner = language.ffn_hidden_size // parts
    expected = {
        "language.layers.0.self_attention.linear_qkv.weight": (own * hidden, tokens * qkv),
        "language.layers.0.self_attention.linear_proj.weight": (tokens * heads, own * hidden),
        "language.layers.0.mlp.linear_fc1.weight": (own * hidden, tokens * 2 * inner),
        "language.layers.0.mlp.linear_fc2.weight": (tokens * inner, own * hidden),
    }
    places, width = 2 * vision.positions_per_item, vision.hidden_size
    heads = -(-vision.heads // parts) * vision.head_width
    inner, wide = vision.ffn_hidden_size // parts, vision.projector_input_size
    expected |= {
        "vision.layers.0.self_attention.linear_qkv.weight": (places * width, places * 3 * heads),
        "vision.layers.0.self_attention.linear_proj.weight": (places * heads, places * width),
        "vision.layers.0.mlp.linear_fc1.weight": (places * width, places * inner),
        "vision.layers.0.mlp.linear_fc2.weight": (places * inner, places * width),
    }
    features, words = 2 * vision.tokens_per_item, language.words_of_rank(parts)
    expected |= {
        "projector.linear_fc1.weight": (features * wide, features * hidden // parts),
        "projector.linear_fc2.weight": (features * hidden // parts, features * hidden),
        "head.weight": (7 * hidden, 7 * words),
    }
    expected |= {name.replace(".0.", ".1."): each for name, each in expected.items()}
    assert kept == {name: (4 * rows, 4 * outputs) for name, (rows, outputs) in expected.items()}


def reductions(links, plan):
    """Return for each gradient reduction of a step whether deferred products were running."""
    begun, running = [], []
    reduce, add = _ParamAndGradBucketGroup.start_grad_sync, DeferredWeights.add

    def start_grad_sync(group, **options):
        if group.grad_reduce_handle is None:
            begun.append(bool(running))
        reduce(group, **options)

    def add_late(*late, is_last):
        running.append(is_last)
        add(*late, is_last=is_last)
        running.clear()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync)
        monkeypatch.setattr(DeferredWeights, "add", add_late)
        train_steps(links, plan, [[[(2, 9)], [(1, 8)], [(3, 5)], [(1, 14)], [(1, 5)], [(2, 4)]]])
    return begun


def test_gradients_are_reduced_while_the_last_products_run(small_buckets):
    """Prevents data-parallel ranks from reducing all gradients after the last computation."""
    plan = in_two_parts(toy(5, data=2))
    for begun in run_ranks(plan.parallel, reductions, plan)[:2]:
        assert len(begun) > 3
        assert begun == [False, *[True] * (len(begun) - 1)]  # the embedding's is in the first part


def test_other_linears_are_refused():
    """Prevents a split backward with Transformer Engine, which sums weight gradients at once."""
    with pytest.raises(UserError, match="schedule zb-h1, whose split backward only"):
        build_stage(in_two_parts(toy(5)), 0, provider="te")
