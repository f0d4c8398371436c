"""The profiler's memory against real steps, and its packs against what a fit needs. No timings."""

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from native_resolution_cases import qwen2_5_vl, qwen3_vl
from ranks import run_ranks
from toy import OPTIONS, PROFILE, stages_of, toy_batch, toy_model, toy_omni_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.measured_shares import context_sizes
from megatron.vlm.measure.profiler import (
    KeptActivations,
    ProfileOptions,
    Profiler,
    _slowdown,
    kept_bytes_of_units,
    peak_activation_bytes,
    profiled_batches,
    random_batch,
)
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.profile import Measured, fit_residuals
from omnibal.job.job import JobSpec
from omnibal.model.levels import ContextExchange
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names, unit_kinds, unit_names
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

PACKS = [
    [(2, 9), (1, 14)], [(3, 5)], [(1, 8), (1, 6), (2, 11)], [(4, 30), (1, 12)], [(1, 20)],
]  # fmt: skip


def features_of(batches):
    """[packs, 5], counted from the tensors themselves."""
    return np.array(
        [
            (
                1,
                len(batch.pixels_TCPP),
                len(batch.token_ids_S),
                sum(length**2 for length in batch.segment_tokens),
                len(batch.labels_L),
            )
            for batch in batches
        ],
        np.float64,
    )


def keep_and_let_go(links):
    layer, x = torch.nn.Linear(8, 8, bias=False), torch.randn(100, 8)
    kept = KeptActivations(layer)
    with kept.recording():
        exponential = layer(x).exp()  # the linear layer keeps its input, exp its own output
        loss = (exponential * exponential.view(-1, 8)).sum()  # which the product keeps as well
    assert kept.now_bytes == kept.peak_bytes == 2 * x.nbytes
    loss.backward()
    assert (kept.now_bytes, kept.peak_bytes) == (0, 2 * x.nbytes)
    received = torch.zeros(50)
    kept.hold(received)
    kept.hold(received.view(5, 10)[:2])
    assert kept.now_bytes == received.nbytes
    del received
    assert kept.now_bytes == 0


def test_kept_bytes_count_each_storage_once_and_until_it_is_let_go():
    """Prevents memory that is counted twice, with the weights, or for ever."""
    run_ranks(Parallel(pipeline=1), keep_and_let_go)


def by_unit_and_whole(stage, batch):
    """Bytes that units keep one by one, and those that the stage keeps of a forward."""
    kept = KeptActivations(stage)
    with kept.recording():
        loss = stage(batch)
    whole = kept.now_bytes
    loss.backward()
    assert kept.now_bytes == 0
    return kept_bytes_of_units(stage, batch), whole


def units_and_stage(links, plan):
    stage = build_stage(plan, 0)
    sizes = [(3, (20, 40), 7), (1, (30,), 30), (6, (50, 9, 41), 1)]
    return [by_unit_and_whole(stage, random_batch(plan.model, *each)) for each in sizes]


def test_units_add_up_to_what_a_whole_stage_keeps():
    """Prevents tensors between units that count for both, or for none."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    for by_unit, whole in run_ranks(Parallel(pipeline=1), units_and_stage, plan)[0]:
        assert set(by_unit) == set(unit_names(model))
        assert sum(by_unit[unit] for unit in unit_names(model)) == pytest.approx(whole, abs=9)


def test_units_of_two_encoders_add_up_and_are_measured():
    """Prevents: an audio encoder that is measured as the first one, or that keeps what is not
    counted; features of images that go missing before the language embed."""
    model = toy_omni_model()
    plan = toy_plan(model, stages_of(model))
    work = partial(units_and_profile, clips=4)
    options = replace(PROFILE, max_clips=5)
    [(by_unit, whole, profile)] = run_ranks(plan.parallel, work, plan, options, 3, (50, 10), 7)
    assert set(by_unit) == set(unit_names(model))
    assert sum(by_unit[unit] for unit in unit_names(model)) == pytest.approx(whole, abs=9)
    cost = Measured(profile).costs(model, plan.cluster, plan.parallel, "fp32")
    counted = analytic_cost(model, plan.cluster, plan.parallel, "fp32")
    clip, tile = (np.array([name == one for name in cost.features]) for one in ("clips", "tiles"))
    for name, unit in cost.units.items():
        assert unit.forward_ms.any() and unit.backward_ms.any()
        assert not name.startswith("audio") or not unit.forward_ms @ tile
        if name.endswith("_layer"):
            assert unit.recompute_ms.any()
        if name.startswith("audio"):
            kept = unit.activation_bytes @ clip
            assert kept == pytest.approx(counted.units[name].activation_bytes @ clip, rel=0.35)


def units_and_profile(links, plan, options, *sizes, **items):
    batch = random_batch(plan.model, *sizes, **items)
    by_unit, whole = by_unit_and_whole(build_stage(plan, 0), batch)
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return by_unit, whole, profiler.result([profiler.round()])


@pytest.mark.parametrize("model", [qwen3_vl(), qwen2_5_vl()], ids=["Qwen3-VL", "Qwen2.5-VL"])
def test_units_of_images_add_up_and_are_measured(model):
    """Prevents: a kind of encoder layer that no profile has, as few layers are measured, or that
    costs nothing where images are large; deepstack projectors that count for no unit."""
    plan = toy_plan(model, stages_of(model))
    work = partial(units_and_profile, images=(24, 16, 12))
    options = replace(PROFILE, max_tiles=0, max_image_tokens=90, max_tokens=150)
    [(by_unit, whole, profile)] = run_ranks(plan.parallel, work, plan, options, 0, (90, 10), 7)
    kinds = {kind.name: kind.measured_name for kind in unit_kinds(model)}
    names = [kinds[name] for name in unit_names(model)]
    assert set(by_unit) == set(names)
    # Means of layers that are not all alike: the first language layers add features.
    assert sum(by_unit[name] for name in names) == pytest.approx(whole, rel=0.02)
    cost = Measured(profile).costs(model, plan.cluster, plan.parallel, "fp32")
    counted = analytic_cost(model, plan.cluster, plan.parallel, "fp32")
    token = np.array([name == "image_tokens" for name in cost.features])
    for name, unit in cost.units.items():
        assert unit.forward_ms.any() and unit.backward_ms.any(), name
        if name.startswith("vision"):
            kept = unit.activation_bytes @ token
            # Plain torch keeps more than fused operations.
            assert 0.9 < kept / (counted.units[name].activation_bytes @ token) < 2
    fitted = {residual.unit for residual in fit_residuals(profile, model)}
    assert fitted == set(names)


def profile_and_step(links, plan, packs=PACKS, options=PROFILE):
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    peak_bytes = peak_activation_bytes(
        trainer, lambda: train_step(trainer, MicroBatchStream.of(batches))
    )
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return peak_bytes, profiler.result([profiler.round()])


@pytest.mark.parametrize(
    ("cuts", "recompute"),
    [
        pytest.param((3,), {}, id="cut-in-the-vision-tower"),
        pytest.param((6,), {}, id="cut-before-the-language-embed"),
        pytest.param((4,), {"vision": (1,), "language": (0, 1, 2)}, id="recomputing-both"),
    ],
)
def test_predicted_peak_activations_are_those_of_a_step(cuts, recompute):
    """Prevents plans that do not fit, or recompute in vain, in a 1F1B step of unequal packs."""
    model = toy_model()
    stages = stages_of(model, *cuts, **recompute)
    plan = toy_plan(model, stages)
    ranks = run_ranks(plan.parallel, profile_and_step, plan)
    profile = ranks[0][1]
    cost = Measured(profile).costs(model, plan.cluster, plan.parallel, "fp32")
    batches = [toy_batch(model, pack, seed=i) for i, pack in enumerate(PACKS)]
    predicted = predicted_bytes(cost, stages, features_of(batches))
    assert predicted == pytest.approx([peak for peak, _ in ranks], rel=0.03)


def predicted_bytes(cost, stages, features):
    """Activations that each stage is predicted to keep in a step of these packs."""
    slot = np.arange(len(features))
    one_rank = {"step": 0 * slot, "dp_rank": 0 * slot, "slot": slot, "data_parallel_size": 1}
    memories = stage_memories(cost, [stages], Workload(features=features, **one_rank))
    return [memory.activations_gib * GIB for memory in memories]


def test_predicted_peak_activations_of_two_encoders_are_those_of_a_step():
    """Prevents features of images that a stage of audio layers is thought to keep, or not to hold
    while they pass it."""
    model = toy_omni_model()
    stages = stages_of(model, 8, vision=(0, 2), audio=(0,))
    plan = toy_plan(model, stages)
    packs = [[*one, (0, 6, 1 + place)] for place, one in enumerate(PACKS)]
    options = replace(PROFILE, max_clips=5)
    ranks = run_ranks(plan.parallel, profile_and_step, plan, packs, options)
    cost = Measured(ranks[0][1]).costs(model, plan.cluster, plan.parallel, "fp32")
    batches = [toy_batch(model, pack, seed=i) for i, pack in enumerate(packs)]
    fixed, tiles, *others = features_of(batches).T
    clips = [len(batch.frames_CBF) for batch in batches]
    items = {"fixed": fixed, "tiles": tiles, "clips": np.array(clips, np.float64)}
    columns = items | dict(zip(("tokens", "squared_tokens", "loss_tokens"), others, strict=True))
    features = np.stack([columns[name] for name in cost.features], 1)
    predicted = predicted_bytes(cost, stages, features)
    assert predicted == pytest.approx([peak for peak, _ in ranks], rel=0.01)


def test_a_profile_measures_every_unit_link_and_update_on_all_processes():
    """Prevents a profile that lacks a part, or differs from process to process."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4))
    (_, profile), (_, other) = run_ranks(plan.parallel, profile_and_step, plan)
    assert profile == other
    assert profile.processes == 2
    for unit in unit_names(model):
        measured = [m for m in profile.measurements if m.unit == unit]
        assert len({(m.tiles, m.tokens) for m in measured}) == len(measured) >= 6
    assert len({m.parameters for m in profile.optimizer}) == 2
    assert len({m.bytes for m in profile.links}) >= 3


def profiled_shares(links, plan):
    options = replace(PROFILE, max_tokens=128, contexts=(2,))
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return profiler.result([profiler.round()]).shares


def test_layers_are_measured_on_shares_of_packs():
    """Prevents a profile that lacks an exchange, or says of a share what another rank has."""
    model = toy_model()
    ranks = run_ranks(Parallel(pipeline=2), profiled_shares, toy_plan(model, stages_of(model, 4)))
    assert ranks[0] == ranks[1]
    for exchange in ContextExchange:
        shares = [one for one in ranks[0] if one.exchange is exchange]
        assert {(one.unit, one.context) for one in shares} == {("language_layer", 2)}
        # Whole packs of one sample: rank 0 has the first and the last quarter, of as much attention
        # as the two between them; and packs of 24 or so tokens a sample, of which one is cut.
        sizes = [(one.tokens, one.squared_tokens, one.exchanged_tokens) for one in shares]
        assert sizes[0] == (32, 64**2 / 2, 32)
        assert sizes[2] == (8, 16**2 / 2, 8)
        assert sizes[1][0] == 32 and 0 < sizes[1][2] <= 24
        assert all(one.forward_ms > 0 and one.backward_ms > 0 for one in shares)


def slowdowns(links):
    found = []
    for cores in ({0}, {0, 1}):
        with mock.patch("os.sched_getaffinity", return_value=cores):
            found.append(_slowdown(10.0 * (1 + dist.get_rank())))
    return found


def test_processes_that_share_cores_take_as_long_as_the_slowest():
    """Prevents costs of those that had a core to themselves while others waited for one."""
    first, second = run_ranks(Parallel(pipeline=1, data=2), slowdowns)
    assert first == pytest.approx([2.0, 1.0])
    assert second == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("processes", "sizes"), [(1, ()), (2, (2,)), (6, (2,)), (8, (2, 4, 8)), (12, (2, 4))]
)
def test_context_sizes_leave_no_process_over(processes, sizes):
    """Prevents a measurement that hangs, or that some processes sit out."""
    assert context_sizes(processes) == sizes


def runs_of_layers(links, plan):
    profiler, runs = Profiler(JobSpec.of_plan(plan), links, PROFILE), []
    stage = profiler._trainer.stage
    for layer in (*stage.vision.layers, *stage.language.layers):
        layer.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    before = [weight.clone() for weight in stage.parameters()]
    result = profiler.result([profiler.round()])
    unchanged = all(map(torch.equal, before, stage.parameters()))
    return result, runs.count(True), runs.count(False), unchanged


def test_layers_are_also_measured_recomputed():
    """Prevents a cost of recomputation of something else, and weights that drift with updates."""
    model = toy_model()
    profile, with_graph, without, unchanged = run_ranks(
        Parallel(pipeline=1), runs_of_layers, toy_plan(model, stages_of(model))
    )[0]
    layers, packs = 4, len({(m.tiles, m.tokens) for m in profile.measurements})
    # Plain; and forward without a graph, then again with one.
    assert (with_graph, without) == (layers * packs * 2, layers * packs)
    assert unchanged
    recomputed = {m.unit for m in profile.measurements if m.recompute_ms is not None}
    assert recomputed == {"vision_layer", "language_layer"}


@pytest.mark.parametrize(
    ("max_tiles", "max_tokens", "tokens_per_sample"),
    [(12, 448, 57), (6, 384, 73), (16, 4096, 700), (8, 120, 100)],
)
def test_packs_tell_all_costs_apart(max_tiles, max_tokens, tokens_per_sample):
    """Prevents packs in which one size follows from the others, so that a fit mixes up costs."""
    model = toy_model()
    sizes = {"max_tiles": max_tiles, "max_tokens": max_tokens, "repetitions": 1}
    options = ProfileOptions(**sizes, tokens_per_sample=tokens_per_sample, layers=1)
    batches = list(profiled_batches(model, options))
    features = features_of(batches)
    for batch in batches:
        assert sum(batch.segment_tokens) == batch.tokens <= max_tokens
        assert 0 < batch.tiles <= max_tiles
        assert batch.tiles * model.vision.tokens_per_item <= batch.tokens
    scaled = features / np.linalg.norm(features, axis=0)
    assert scaled.shape[1] == len(feature_names(model))
    assert np.linalg.cond(scaled) < 60
    mean_length = features[:, 2].sum() / sum(len(batch.segment_tokens) for batch in batches)
    assert mean_length == pytest.approx(min(tokens_per_sample, max_tokens), rel=0.3)
