"""Mixture of experts with expert parallelism: against one process, and across its sizes."""

import functools

import pytest
from test_tensor_parallel import assert_same_training, run
from toy import stages_of, toy_model, toy_plan

from omnibal.layers import ExpertsConfig, LayerRun

# Packs as (tiles, text tokens): token counts that do not divide, a pack without images, and one
# whose tokens carry no loss.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 7)], [(0, 12), (0, 2)], [(1, 2)], [(0, 5), (2, 9)]],
]


def model_of(**changes):
    """Two vision layers, and three language layers of eight experts each."""
    sizes = {"experts": 8, "experts_per_token": 2, "ffn_hidden_size": 10, "auxiliary_loss": 0.5}
    run_of_layers = LayerRun(layers=1, experts=ExpertsConfig(**{**sizes, **changes}))
    model = toy_model(layers=2, heads=3, hidden_size=24)
    language = model.language.model_copy(update={"runs": (run_of_layers,)})
    return model.model_copy(update={"language": language})


MODEL = model_of()


def plan_of(*cuts, model=MODEL, expert=1, recompute=(), **sizes):
    plan = toy_plan(model, stages_of(model, *cuts, language=recompute), **sizes)
    parallel = plan.parallel.model_copy(update={"expert": expert})
    return plan.model_copy(update={"parallel": parallel})


@functools.cache
def alone():
    [result] = run(plan_of(), STEPS)
    return result


IN_PARTS = {"tensor": 2, "sequence_parallel": True}
# Units: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed, 5-7 language layers.
PLANS = {
    "data-2": plan_of(data=2),
    "experts-2": plan_of(data=2, expert=2),
    "experts-4": plan_of(data=4, expert=4),
    "experts-2-of-data-4": plan_of(data=4, expert=2),
    "pipeline-recomputed": plan_of(6, data=2, expert=2, recompute=(0, 2)),
    "tensor": plan_of(**IN_PARTS),
    "tensor-experts": plan_of(**IN_PARTS, expert=2, recompute=(1,)),
    "tensor-data-experts": plan_of(**IN_PARTS, data=2, expert=4),
    "tensor-pipeline": plan_of(5, **IN_PARTS, expert=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_same_training_as_one_process(plan):
    """Prevents: a size that changes routing, a gradient, the auxiliary loss or the norm."""
    assert_same_training(run(plan, STEPS), plan.parallel.tensor, alone(), rel=2e-5)


# Dealt in turn: a rank without a pack, one with a pack less, and pipelines of several.
UNEVEN = [[[(1, 8)]], [[(2, 9)], [(0, 12)], [(1, 6), (0, 4)]], [[(0, 21)], [(2, 8)], [(0, 7)]]]
UNEVEN_PLANS = {
    "experts-2": plan_of(data=2, expert=2),
    "experts-2-of-data-4": plan_of(data=4, expert=2),
    "pipeline": plan_of(6, data=2, expert=2, recompute=(0, 2)),
    "tensor-experts-4": plan_of(**IN_PARTS, data=2, expert=4),
}


@functools.cache
def alone_uneven():
    [result] = run(plan_of(), UNEVEN)
    return result


@pytest.mark.parametrize("plan", UNEVEN_PLANS.values(), ids=UNEVEN_PLANS)
def test_ranks_without_a_pack_join(plan):
    """Prevents: a rank that waits for another's tokens for ever, or empty packs that count."""
    ranks = run(plan, UNEVEN)
    assert_same_training(ranks, plan.parallel.tensor, alone_uneven(), rel=2e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({}, {"data": 2, "expert": 2}, id="one-to-experts-2"),
        pytest.param({"data": 4, "expert": 4}, {"data": 2}, id="experts-4-to-data-2"),
        pytest.param(
            {"data": 2, "expert": 2, "cuts": (2,)},
            {**IN_PARTS, "expert": 2},
            id="pipeline-to-tensor",
        ),
        pytest.param(
            {**IN_PARTS, "data": 2, "expert": 4},
            {"data": 4, "expert": 2, "cuts": ()},
            id="tensor-to-data",
        ),
    ],
)
def test_resumes_under_another_expert_size(tmp_path, before, after):
    """Prevents: checkpoints whose experts or moments fit one expert-parallel size."""
    results, gradients, weights = alone()
    first, second = (
        plan_of(*sizes.pop("cuts", ()), **sizes) for sizes in (dict(before), dict(after))
    )
    run(first, STEPS[:1], save=tmp_path)
    ranks = run(second, STEPS[1:], load=tmp_path, first=1)
    rest = (results[1:], gradients[1:], weights)
    assert_same_training(ranks, second.parallel.tensor, rest, rel=2e-5)
