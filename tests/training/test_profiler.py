"""Profiler measurements, against real steps and the needs of a fit; times are not bounded."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from native_resolution_cases import qwen2_5_vl, qwen3_5, qwen3_vl
from pipeline_cases import MODEL, pipeline_plan
from ranks import run_ranks
from rich.console import Console
from toy import OPTIONS, PROFILE, stages_of, toy_batch, toy_omni_model, toy_plan, toy_text_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import (
    KeptActivations,
    Profiler,
    _slowdown,
    kept_bytes_of_units,
    peak_activation_bytes,
)
from megatron.vlm.measure.random_batches import (
    ProfileOptions,
    context_sizes,
    make_profiled_batches,
    random_batch,
)
from megatron.vlm.measure.rates import collective_group_sizes, measure_rates
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.cost.profile import fit_residuals
from omnibal.cost.setting import CostSetting
from omnibal.cost.source import CostSource
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
OMNI, TEXT = toy_omni_model(), toy_text_model(rope_base=20)


def features_of(names, batches):
    """Return features [packs, features], counted from the tensors."""
    columns = [
        {
            "fixed": 1,
            "tiles": 0 if batch.pixels_TCPP is None else len(batch.pixels_TCPP),
            "clips": 0 if batch.frames_CBF is None else len(batch.frames_CBF),
            "tokens": len(batch.token_ids_S),
            "squared_tokens": sum(length**2 for length in batch.segment_tokens),
            "loss_tokens": len(batch.labels_L),
        }
        for batch in batches
    ]
    return np.array([[counts[name] for name in names] for counts in columns], np.float64)


@pytest.mark.in_own_process
def test_kept_bytes_count_each_storage_once_and_until_it_is_let_go():
    """Prevents storages counted twice, as weights, or after their release."""
    layer, x = torch.nn.Linear(8, 8, bias=False), torch.randn(100, 8)
    kept = KeptActivations(layer)
    with kept.recording():
        exponential = layer(x).exp()  # linear saves its input, exp its output
        loss = (exponential * exponential.view(-1, 8)).sum()  # saved by the product too
    assert kept.now_bytes == kept.peak_bytes == 2 * x.nbytes
    loss.backward()
    assert (kept.now_bytes, kept.peak_bytes) == (0, 2 * x.nbytes)
    received = torch.zeros(50)
    kept.hold(received)
    kept.hold(received.view(5, 10)[:2])
    assert kept.now_bytes == received.nbytes
    del received
    assert kept.now_bytes == 0


def unit_and_stage_bytes(stage, batch):
    """Return activation bytes saved by each unit alone, and by the stage's forward."""
    kept = KeptActivations(stage)
    with kept.recording():
        loss = stage(batch)
    whole = kept.now_bytes
    loss.backward()
    assert kept.now_bytes == 0
    return kept_bytes_of_units(stage, batch), whole


def measure_units_and_stage(links, plan):
    stage = build_stage(plan, 0)
    sizes = [(3, (20, 40), 7), (1, (30,), 30), (6, (50, 9, 41), 1)]
    tiled = plan.model.takes_images
    return [
        unit_and_stage_bytes(stage, random_batch(plan.model, tiles * tiled, *each))
        for tiles, *each in sizes
    ]


@pytest.mark.parametrize("model", [MODEL, TEXT], ids=["tiles", "text"])
def test_units_add_up_to_what_a_whole_stage_keeps(model):
    """Prevents tensors between units that are counted twice or never."""
    [found] = run_ranks(Parallel(pipeline=1), measure_units_and_stage, pipeline_plan(model=model))
    for by_unit, whole in found:
        assert set(by_unit) == set(unit_names(model))
        assert sum(by_unit[unit] for unit in unit_names(model)) == pytest.approx(whole, abs=9)


def measure_and_profile(links, plan, options, *sizes, **items):
    batch = random_batch(plan.model, *sizes, **items)
    by_unit, whole = unit_and_stage_bytes(build_stage(plan, 0), batch)
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return by_unit, whole, profiler.result([profiler.round()])


CLIPS = (3, (50, 10), 7), {"clips": 4}, replace(PROFILE, max_clips=5)
OF_IMAGES = replace(PROFILE, max_tiles=0, max_image_tokens=90, max_tokens=150)
IMAGES = (0, (90, 10), 7), {"images": (24, 16, 12)}, OF_IMAGES


@pytest.mark.parametrize(
    ("model", "batch", "item", "tolerance", "ratios"),
    [
        (OMNI, CLIPS, "audio clips", {"abs": 9}, (0.65, 1.35)),
        # Means over unequal layers. Plain torch saves more than fused operations.
        (qwen3_vl(), IMAGES, "vision image_tokens", {"rel": 0.02}, (0.9, 2)),
        (qwen2_5_vl(), IMAGES, "vision image_tokens", {"rel": 0.02}, (0.9, 2)),
        (qwen3_5(prediction_layers=1), IMAGES, "vision image_tokens", {"rel": 0.02}, (0.9, 2)),
    ],
    ids=["audio", "Qwen3-VL", "Qwen2.5-VL", "Qwen3.5"],
)
def test_units_of_encoders_add_up_and_are_measured(model, batch, item, tolerance, ratios):
    """Prevents swapped or free encoder units, and uncounted deepstack projectors."""
    (sizes, items, options), (tower, feature) = batch, item.split()
    plan = toy_plan(model, stages_of(model))
    work = partial(measure_and_profile, **items)
    [(by_unit, whole, profile)] = run_ranks(plan.parallel, work, plan, options, *sizes)
    kinds = {kind.name: kind.measured_name for kind in unit_kinds(model)}
    names = [kinds[name] for name in unit_names(model)]
    assert set(by_unit) == set(names) == {one.unit for one in fit_residuals(profile, model)}
    assert sum(by_unit[name] for name in names) == pytest.approx(whole, **tolerance)
    cost = CostSource(profile).costs(CostSetting(model, plan.cluster, plan.parallel, "fp32"))
    counted = analytic_cost(CostSetting(model, plan.cluster, plan.parallel, "fp32"))
    own, tile = (np.array([name == one for name in cost.features]) for one in (feature, "tiles"))
    for name, unit in cost.units.items():
        assert unit.forward_ms.any() and unit.backward_ms.any(), name
        assert unit.recompute_ms.any() or not name.endswith("_layer"), name
        if name.startswith(tower):
            assert not unit.forward_ms @ tile
            kept = unit.activation_bytes @ own / (counted.units[name].activation_bytes @ own)
            assert ratios[0] < kept < ratios[1], name


def profile_and_step(links, plan, packs, options):
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    peak_bytes = peak_activation_bytes(
        trainer, lambda: train_step(trainer, MicroBatchStream.of(batches))
    )
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return peak_bytes, profiler.result([profiler.round()])


BOTH = "recomputing-both"
PEAKS = {
    "cut-in-the-vision-tower": (pipeline_plan(3), PACKS, PROFILE, 0.03),
    "cut-before-the-language-embed": (pipeline_plan(6), PACKS, PROFILE, 0.03),
    BOTH: (pipeline_plan(4, vision=(1,), language=(0, 1, 2)), PACKS, PROFILE, 0.03),
    # A stage of audio layers frees the image features once they are sent.
    "two-encoders": (
        toy_plan(OMNI, stages_of(OMNI, 8, vision=(0, 2), audio=(0,))),
        [[*one, (0, 6, 1 + place)] for place, one in enumerate(PACKS)],
        replace(PROFILE, max_clips=5), 0.01,
    ),
}  # fmt: skip


@cache
def peaks_and_profiles(name):
    plan, packs, options, _ = PEAKS[name]
    return run_ranks(plan.parallel, profile_and_step, plan, packs, options)


@pytest.mark.parametrize("name", PEAKS)
def test_predicted_peak_activations_are_those_of_a_step(name):
    """Prevents plans that exceed memory or recompute needlessly in a 1F1B step of unequal packs."""
    (plan, packs, _, rel), ranks = PEAKS[name], peaks_and_profiles(name)
    setting = CostSetting(plan.model, plan.cluster, plan.parallel, "fp32")
    cost = CostSource(ranks[0][1]).costs(setting)
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    slot = np.arange(len(packs))
    one_rank = {"step": 0 * slot, "dp_rank": 0 * slot, "slot": slot, "data_parallel_size": 1}
    workload = Workload(features=features_of(cost.features, batches), **one_rank)
    memories = stage_memories(cost, [plan.stages], workload)
    predicted = [memory.activations_gib * GIB for memory in memories]
    assert predicted == pytest.approx([peak for peak, _ in ranks], rel=rel)


def test_a_profile_measures_every_unit_link_and_update_on_all_processes():
    """Prevents profiles that lack a part or differ between processes."""
    (_, profile), (_, other) = peaks_and_profiles(BOTH)
    assert profile == other and profile.processes == 2
    for unit in unit_names(MODEL):
        measured = [m for m in profile.measurements if m.unit == unit]
        assert len({(m.tiles, m.tokens) for m in measured}) == len(measured) >= 6
    assert len({m.parameters for m in profile.optimizer}) == 2
    assert len({m.bytes for m in profile.links}) >= 3


def profile_shares(links, plan):
    options = replace(PROFILE, max_tokens=128, contexts=(2,))
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    return profiler.result([profiler.round()]).shares


def test_layers_are_measured_on_shares_of_packs():
    """Prevents profiles that lack a context exchange, or attribute another rank's shard sizes."""
    ranks = run_ranks(Parallel(pipeline=2), profile_shares, pipeline_plan(4))
    assert ranks[0] == ranks[1]
    for exchange in ContextExchange:
        shares = [one for one in ranks[0] if one.exchange is exchange]
        assert {(one.unit, one.context) for one in shares} == {("language_layer", 2)}
        # Packs of one sample: rank 0 has the first and last quarter, with half of the attention.
        # Packs of about 24 tokens per sample: one sample is cut.
        sizes = [(one.tokens, one.squared_tokens, one.exchanged_tokens) for one in shares]
        assert sizes[0] == (32, 64**2 / 2, 32)
        assert sizes[2] == (8, 16**2 / 2, 8)
        assert sizes[1][0] == 32 and 0 < sizes[1][2] <= 24
        assert all(one.forward_ms > 0 and one.backward_ms > 0 for one in shares)


def measure_slowdowns(links):
    with mock.patch("os.sched_getaffinity", side_effect=[{0}, {0, 1}]):
        return [_slowdown(10.0 * (1 + dist.get_rank())) for _ in range(2)]


def test_processes_that_share_cores_take_as_long_as_the_slowest():
    """Prevents costs of processes with an own core while others share one."""
    found = run_ranks(Parallel(pipeline=1, data=2), measure_slowdowns)
    assert found == [pytest.approx([2.0, 1.0]), pytest.approx([1.0, 1.0])]


def test_context_sizes_leave_no_process_over():
    """Prevents measurements that hang or exclude some processes."""
    found = {count: context_sizes(count) for count in (1, 2, 6, 8, 12)}
    assert found == {1: (), 2: (2,), 6: (2,), 8: (2, 4, 8), 12: (2, 4)}


def count_layer_runs(links, plan):
    profiler, runs = Profiler(JobSpec.of_plan(plan), links, PROFILE), []
    stage = profiler._trainer.stage
    for layer in (*stage.vision.layers, *stage.language.layers):
        layer.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    before = [weight.clone() for weight in stage.parameters()]
    result = profiler.result([profiler.round()])
    unchanged = all(map(torch.equal, before, stage.parameters()))
    return result, runs.count(True), runs.count(False), unchanged


def test_layers_are_also_measured_recomputed():
    """Prevents wrong recomputation costs, and weights changed by the timed updates."""
    plan = pipeline_plan()
    [(profile, with_graph, without, unchanged)] = run_ranks(plan.parallel, count_layer_runs, plan)
    layers, packs = 4, len({(m.tiles, m.tokens) for m in profile.measurements})
    # Once plain; once recomputed (forward without a graph, then with one).
    assert (with_graph, without) == (layers * packs * 2, layers * packs)
    assert unchanged
    recomputed = {m.unit for m in profile.measurements if m.recompute_ms is not None}
    assert recomputed == {"vision_layer", "language_layer"}


@pytest.mark.parametrize(
    ("max_tiles", "max_tokens", "tokens_per_sample"),
    [(12, 448, 57), (6, 384, 73), (16, 4096, 700), (8, 120, 100), (0, 448, 57)],
)
def test_packs_tell_all_costs_apart(max_tiles, max_tokens, tokens_per_sample):
    """Prevents collinear pack sizes, which leave costs undetermined in a fit."""
    options = ProfileOptions(
        max_tiles=max_tiles, max_tokens=max_tokens, tokens_per_sample=tokens_per_sample,
        repetitions=1, layers=1,
    )  # fmt: skip
    model = MODEL if max_tiles else TEXT
    batches, names = list(make_profiled_batches(model, options)), feature_names(model)
    features = features_of(names, batches)
    for batch in batches:
        assert sum(batch.segment_tokens) == batch.tokens <= max_tokens
        assert min(max_tiles, 1) <= batch.tiles <= max_tiles
        assert batch.tiles * MODEL.vision.tokens_per_item <= batch.tokens
    assert np.linalg.cond(features / np.linalg.norm(features, axis=0)) < 60
    tokens = features[:, names.index("tokens")].sum()
    mean_length = tokens / sum(len(batch.segment_tokens) for batch in batches)
    assert mean_length == pytest.approx(min(tokens_per_sample, max_tokens), rel=0.3)


SIZES = MeasuredSizes(rows=(8, 512), inner=(16, 512), outer=(32,), collective_bytes=(1680, 6720))


def measure(links):
    return measure_rates("this one", "fp32", SIZES, Console(quiet=True))


@pytest.mark.parametrize("processes", [1, 3])
def test_rates_are_of_all_processes(processes):
    """Prevents deadlocked groups, skipped sizes, and collectives of one process."""
    ranks = run_ranks(Parallel(pipeline=processes), measure)
    assert all(rates == ranks[0] for rates in ranks)
    sizes = [(one.rows, one.inner, one.outer) for one in ranks[0].products]
    assert sizes == list(product(SIZES.rows, SIZES.inner, SIZES.outer))
    measured = {(one.kind, one.ranks, one.bytes) for one in ranks[0].collectives}
    assert measured == {
        (kind, size, sent)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for size in {1: (), 3: (2, 3)}[processes]
        for sent in SIZES.collective_bytes
    }
    assert [one.bytes for one in ranks[0].copies] == [1 << 27]
    assert (ranks[0].hidden is None) == (processes == 1)
    small, large = ranks[0].products[0], ranks[0].products[-1]
    # 2,048 times the operations, minus noise of a shared core.
    assert large.ms > 5 * small.ms


def test_group_sizes_are_those_of_tensor_parallelism():
    """Prevents groups of one process, and sizes that no job uses."""
    assert [*map(collective_group_sizes, (1, 2, 6, 8))] == [[], [2], [2, 4, 6], [2, 4, 8]]
