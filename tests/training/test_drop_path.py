"""Drop path: which tile skips which branch is the tile's own affair, whoever computes it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.drop_path import branch_scales
from megatron.vlm.step.train import build_trainer, train_step

pytestmark = pytest.mark.quick

RATE = 0.5
SAMPLES = [[(2, 9), (1, 14)], [(3, 5)], [(0, 6)]]


def random_keys(tiles, seed):
    values = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, tiles)
    return torch.from_numpy(values)


def losses_of(links, plan, rate=RATE, reverse=False):
    """Losses and norms of three steps on the same tiles, in either order."""
    trainer = build_trainer(plan, links, replace(OPTIONS, drop_path_rate=rate), steps=10, seed=3)
    packs = [toy_batch(plan.model, samples, seed=i) for i, samples in enumerate(SAMPLES)]
    keys = [random_keys(pack.tiles, seed) for seed, pack in enumerate(packs)]
    batches = [replace(p, drop_path_keys_T=k) for p, k in zip(packs, keys, strict=True)]
    if reverse:
        batches = batches[::-1]
    results = [train_step(trainer, MicroBatchStream.of(batches)) for _ in range(3)]
    return [(result.loss, result.grad_norm) for result in results]


def single_process(rate=RATE, layer_scale_init=1.0, **recompute):
    model = toy_model(layer_scale_init=layer_scale_init)
    plan = toy_plan(model, stages_of(model, **recompute))
    return run_ranks(plan.parallel, losses_of, plan, rate)[0]


def test_splits_tensor_ranks_recomputation_and_order_draw_alike():
    """Prevents: draws that differ between ranks, between forward and its recomputation, or with
    the place of a tile in the step."""
    expected = single_process()
    assert expected[0][0] != pytest.approx(single_process(rate=0.0)[0][0], rel=1e-4)
    assert single_process(vision=(0, 1, 2, 3)) == expected
    model = toy_model(layer_scale_init=1.0)
    for plan in (
        toy_plan(model, stages_of(model, 3, vision=(0, 3))),
        toy_plan(model, stages_of(model), tensor=2),
    ):
        for rank in run_ranks(plan.parallel, losses_of, plan):
            for got, want in zip(rank, expected, strict=True):
                assert got == pytest.approx(want, rel=1e-5)
    whole = toy_plan(model, stages_of(model))
    [reordered] = run_ranks(whole.parallel, losses_of, whole, RATE, True)
    assert reordered[0] == pytest.approx(expected[0], rel=1e-5)


def test_branches_without_layer_scale_are_dropped_as_with_a_scale_of_one():
    """Prevents: encoders without layer scale, which end their branches in another way, of which
    nothing is dropped, or where a recomputed layer drops nothing."""
    bare = single_process(layer_scale_init=None)
    assert bare[0][0] == pytest.approx(single_process()[0][0], rel=1e-6)
    assert bare[0][0] != pytest.approx(single_process(rate=0.0)[0][0], rel=1e-4)
    model = toy_model(layer_scale_init=None)
    plan = toy_plan(model, stages_of(model, 3, vision=(0, 3)))
    for rank in run_ranks(plan.parallel, losses_of, plan):
        for got, want in zip(rank, bare, strict=True):
            assert got == pytest.approx(want, rel=1e-5)


def eval_loss(links, plan):
    trainer = build_trainer(plan, links, replace(OPTIONS, drop_path_rate=RATE), steps=10, seed=3)
    pack = toy_batch(plan.model, SAMPLES[0], seed=0)
    keys = random_keys(pack.tiles, 0)
    with_keys = replace(pack, drop_path_keys_T=keys)
    train_step(trainer, MicroBatchStream.of([with_keys]))
    trainer.model.eval()
    return float(trainer.stage(with_keys)), float(trainer.stage(pack))


def test_nothing_is_dropped_in_evaluation():
    """Prevents: held-out losses of a thinned model, or of the last training pack's draws."""
    model = toy_model(layer_scale_init=1.0)
    plan = toy_plan(model, stages_of(model))
    [(with_keys, without)] = run_ranks(plan.parallel, eval_loss, plan)
    assert with_keys == without


def test_rates_rise_linearly_and_kept_branches_make_up_for_dropped_ones():
    """Prevents: a first layer that is dropped, or outputs that shrink with the rate."""
    layers, tiles = 9, 40_000
    scales = branch_scales(random_keys(tiles, 1), range(layers), layers, rate=0.4).numpy()
    assert scales.shape == (layers, 2, tiles)
    dropped = (scales == 0).mean(axis=2)
    expected = np.linspace(0, 0.4, layers)
    np.testing.assert_allclose(dropped, np.stack([expected, expected], axis=1), atol=0.01)
    np.testing.assert_allclose(scales.mean(axis=2), 1, atol=0.02)


def test_draws_of_layers_branches_and_neighbouring_tiles_are_unrelated():
    """Prevents: all branches of a tile dropped together, which removes the tile."""
    keys = torch.arange(20_000)  # the worst case: keys in a row
    kept = branch_scales(keys, range(4, 8), 8, rate=0.5).numpy().reshape(8, -1) > 0
    correlations = np.corrcoef(kept)
    assert np.abs(correlations - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(kept[0, :-1], kept[0, 1:])[0, 1]) < 0.03


def test_stage_draws_its_layers_as_the_whole_tower_does():
    """Prevents: layers numbered from each stage's own first."""
    keys = random_keys(50, 2)
    whole = branch_scales(keys, range(6), 6, RATE)
    assert torch.equal(branch_scales(keys, range(2, 5), 6, RATE), whole[2:5])
