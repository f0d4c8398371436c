"""Drop path: a tile's own key decides which branches it skips, on any rank."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from toy import OPTIONS, cut_plan, toy_batch, toy_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.drop_path import branch_scales
from megatron.vlm.step.train import build_trainer, train_step

pytestmark = pytest.mark.quick

RATE = 0.5
SAMPLES = [[(2, 9), (1, 14)], [(3, 5)], [(0, 6)]]


SCALED = toy_model(layer_scale_init=1.0)


def random_keys(tiles, seed):
    values = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, tiles)
    return torch.from_numpy(values)


def batches_of(model):
    for seed, samples in enumerate(SAMPLES):
        pack = toy_batch(model, samples, seed=seed)
        yield replace(pack, drop_path_keys_T=random_keys(pack.tiles, seed))


def losses_of(links, plan, rate, order):
    """Return losses and norms of three steps on equal tiles, in either order."""
    trainer = build_trainer(plan, links, replace(OPTIONS, drop_path_rate=rate), steps=10, seed=3)
    batches = [*batches_of(plan.model)][::order]
    results = [train_step(trainer, MicroBatchStream.of(batches)) for _ in range(3)]
    return [(result.loss, result.grad_norm) for result in results]


def losses(model, *cuts, rate=RATE, order=1, recompute=None, **sizes):
    """Return losses and norms of all ranks as one array."""
    plan = cut_plan(model, *cuts, recompute=recompute, **sizes)
    return np.array(run_ranks(plan.parallel, losses_of, plan, rate, order))


@functools.cache
def scaled_losses(rate=RATE):
    return losses(SCALED, rate=rate)


def assert_near(found, expected):
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-5)


def test_splits_tensor_ranks_recomputation_and_order_draw_alike():
    """Prevents draws that differ between ranks, between forward and recomputation, or with a tile's
    place in the step."""
    expected = scaled_losses()
    assert expected[0, 0, 0] != pytest.approx(scaled_losses(0.0)[0, 0, 0], rel=1e-4)
    assert (losses(SCALED, recompute={"vision": (0, 1, 2, 3)}) == expected).all()
    assert_near(losses(SCALED, 3, recompute={"vision": (0, 3)}), expected)
    assert_near(losses(SCALED, tensor=2), expected)
    assert_near(losses(SCALED, order=-1)[:, 0], expected[:, 0])


def test_branches_without_layer_scale_are_dropped_as_with_a_scale_of_one():
    """Prevents encoders without layer scale from dropping nothing, in a forward or its
    recomputation."""
    model = toy_model(layer_scale_init=None)
    bare = losses(model)
    assert bare[0, 0, 0] == pytest.approx(scaled_losses()[0, 0, 0], rel=1e-6)
    assert bare[0, 0, 0] != pytest.approx(scaled_losses(0.0)[0, 0, 0], rel=1e-4)
    assert_near(losses(model, 3, recompute={"vision": (0, 3)}), bare)


def eval_loss(links, plan):
    trainer = build_trainer(plan, links, replace(OPTIONS, drop_path_rate=RATE), steps=10, seed=3)
    [batch, *_] = batches_of(plan.model)
    train_step(trainer, MicroBatchStream.of([batch]))
    trainer.models[0].eval()
    return float(trainer.stage(batch)), float(trainer.stage(replace(batch, drop_path_keys_T=None)))


def test_nothing_is_dropped_in_evaluation():
    """Prevents held-out losses with dropped branches or the last training pack's draws."""
    plan = cut_plan(SCALED)
    [(with_keys, without)] = run_ranks(plan.parallel, eval_loss, plan)
    assert with_keys == without


def test_rates_rise_linearly_and_kept_branches_make_up_for_dropped_ones():
    """Prevents dropping in the first layer, and outputs that shrink with the rate."""
    layers, tiles = 9, 40_000
    scales = branch_scales(random_keys(tiles, 1), range(layers), layers, rate=0.4).numpy()
    assert scales.shape == (layers, 2, tiles)
    dropped = (scales == 0).mean(axis=2)
    expected = np.linspace(0, 0.4, layers)
    np.testing.assert_allclose(dropped, np.stack([expected, expected], axis=1), atol=0.01)
    np.testing.assert_allclose(scales.mean(axis=2), 1, atol=0.02)


def test_draws_of_layers_branches_and_neighbouring_tiles_are_unrelated():
    """Prevents all branches of a tile dropped together, which removes the tile."""
    keys = torch.arange(20_000)  # worst case: consecutive keys
    kept = branch_scales(keys, range(4, 8), 8, rate=0.5).numpy().reshape(8, -1) > 0
    correlations = np.corrcoef(kept)
    assert np.abs(correlations - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(kept[0, :-1], kept[0, 1:])[0, 1]) < 0.03


def test_stage_draws_its_layers_as_the_whole_tower_does():
    """Prevents drop rates by layer numbers that begin at 0 on every stage."""
    keys = random_keys(50, 2)
    whole = branch_scales(keys, range(6), 6, RATE)
    assert torch.equal(branch_scales(keys, range(2, 5), 6, RATE), whole[2:5])
