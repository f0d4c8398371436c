"""First weights are equal for any split, and each rank only draws its own part."""

from unittest.mock import patch

import data_parallel_encoder_cases as dp
import pytest
import torch
from adapter_cases import EVERYWHERE
from mixture_cases import plan_of as mixture_plan
from ranks import run_ranks
from tensor_parallel_cases import ENCODERS, MODELS, OPTIONS, TIED, weights_of, whole
from toy import cut_plan, stages_of, toy_plan

from megatron.vlm.model import initialize
from megatron.vlm.model.initialize import initial_values
from megatron.vlm.step.train import build_trainer

TILES = {"_MAX_SINGLE_TILE": 64, "_TILE": (7, 5)}
"""Tiles so small that parts of any toy matrix cut some."""
IN_PARTS = {"tensor": 2, "sequence_parallel": True}
SPLITS = {
    "tensor-pipeline": cut_plan(MODELS["6B-like"], 2, **IN_PARTS),
    "tensor-sharded-tied": cut_plan(TIED, **IN_PARTS, data=2, sharded=2),
    "sharded": cut_plan(MODELS["for-four"], data=4, sharded=4),
    "tensor-4-with-a-rank-of-padding": cut_plan(MODELS["for-four"], tensor=4),
    "experts": mixture_plan(data=4, expert=2, sharded=4),
    "experts-tensor": mixture_plan(**IN_PARTS, data=2, expert=4),
    "encoders": dp.plan_of(dp.Case({"data": 2}, pipelines=2, sharded=2)),
}


def first_weights(links, plan, origin="seeded"):
    """Return weights by name, and the number of values drawn for each name."""
    drawn = {}
    draw = initialize._draw_tile

    def draw_and_count(model, name, text, shape, inputs):
        values = draw(model, name, text, shape, inputs)
        drawn[name] = drawn.get(name, 0) + values.numel()
        return values

    with patch.multiple(initialize, _draw_tile=draw_and_count, **TILES):
        trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3, origin=origin)
    return weights_of(trainer), drawn


def one_process_weights(model):
    """Return first weights and drawn values of one process."""
    plan = toy_plan(model, stages_of(model))
    [found] = run_ranks(plan.parallel, first_weights, plan)
    return found


@pytest.mark.parametrize("plan", SPLITS.values(), ids=SPLITS)
def test_every_split_begins_with_the_same_bits(plan):
    """Prevents first weights that depend on the number of devices or on a rank's part."""
    expected, _ = one_process_weights(plan.model)
    ranks = run_ranks(plan.parallel, first_weights, plan)
    tensor, found = plan.parallel.tensor, set()
    for first in range(0, len(ranks), tensor):
        group = [weights for weights, _ in ranks[first : first + tensor]]
        for full_name in group[0]:
            name = full_name.removeprefix(ENCODERS)
            value = whole(name, [weights[full_name] for weights in group])
            real = value[tuple(map(slice, expected[name].shape))]
            assert torch.equal(real, expected[name]), name
            assert value.count_nonzero() == real.count_nonzero(), name
            found.add(name)
    assert found == expected.keys()


def test_a_rank_draws_its_part():
    """Prevents every rank from drawing all weights: minutes of one core for a 26B model."""
    for name, parts in (("sharded", 4), ("experts-tensor", 2), ("tensor-pipeline", 2)):
        plan = SPLITS[name]
        _, all_drawn = one_process_weights(plan.model)
        for _, drawn in run_ranks(plan.parallel, first_weights, plan):
            assert sum(drawn.values()) < 1.6 / parts * sum(all_drawn.values())


def test_nothing_is_drawn_that_is_loaded_or_timed():
    """Prevents drawing weights that are loaded, and zero adapters if a checkpoint has none."""
    plan = cut_plan(MODELS["300M-like"], adapters=EVERYWHERE)
    [(_, drawn)] = run_ranks(plan.parallel, first_weights, plan, "loaded")
    assert drawn and all(".adapters." in name for name in drawn)
    plan = cut_plan(MODELS["300M-like"])
    [(weights, drawn)] = run_ranks(plan.parallel, first_weights, plan, "loaded")
    assert not drawn and not any(one.any() for one in weights.values() if one.dim() > 1)
    [(weights, drawn)] = run_ranks(plan.parallel, first_weights, plan, "measured")
    seeded, _ = one_process_weights(plan.model)
    assert not drawn
    for name, one in weights.items():
        if one.dim() > 1:
            without_padding = seeded[name][seeded[name] != 0]
            assert one.std().item() == pytest.approx(without_padding.std().item(), rel=0.5), name


def test_a_seed_stays_with_its_numbers():
    """Prevents first weights of a seed that change between versions."""
    name = "vision.layers.0.mlp.linear_fc2.weight"
    values = initial_values(MODELS["300M-like"], name, (24, 96), 3)
    assert values[0, :3].tolist() == pytest.approx([0.0046111173, -0.119277723, 0.101078830])
    assert values.double().sum().item() == pytest.approx(-1.21093604)
    large = initial_values(MODELS["300M-like"], "head.weight", (1025, 1024), 3)
    assert large[512, [0, 255, 256]].tolist() == pytest.approx(
        [-0.013066029, -0.03848522, 0.02744184]
    )
