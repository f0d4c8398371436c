"""Data-parallel encoders of native-resolution images against plain loops: times, memory, plans."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cost_cases import encoders_cost
from feature_exchange_cases import (
    Passes,
    equal_passes,
    every_choice,
    messages_ms,
    random_choice,
    ranks_ms,
    ranks_of_group,
)
from length_cases import lengths_of

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.cli.plan_results import phases_of_plan
from omnibal.cost.encoder_phase_costs import EncodersCost
from omnibal.data.lengths import Lengths
from omnibal.job.check import check_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import PLAN_FILE
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan, placement_problem
from omnibal.model.config import LanguageConfig, ModelConfig, load_cluster
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderPlacement
from omnibal.model.encoders import ClipsEncoder, ImagesEncoder
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.units import ENCODER_WAITS_MS, deepstack_of, unit_kinds, unit_names
from omnibal.packing.balance import load_bound
from omnibal.packing.items import ItemRuns, share_items
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.whole_samples import deal_group
from omnibal.pipeline.encoder_search import search_encoders
from omnibal.pipeline.encoder_waits import ItemShares, memory_of_encoders
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.workload import Workload

LINKS = {"gpus_per_node": 4, "intra_node_gb_per_s": 40.0, "inter_node_gb_per_s": 20.0}
CLUSTER = load_cluster("h100-80g").model_copy(
    update=LINKS | {"rates": {}, "host_us": 0.0, "hop_us": 0.0}
)
"""Devices on several nodes. Communication sometimes exceeds computation."""


def images_model(*, audio: bool = False, deepstack: tuple[int, ...] = (0, 2)) -> ModelConfig:
    """Return a small model like Qwen3-VL, optionally with an audio encoder."""
    widths = {"layers": 4, "hidden_size": 64, "heads": 2, "ffn_hidden_size": 160}
    widths |= {"normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False}
    encoders = {"vision": ImagesEncoder(
        patch_size=16, frames_per_patch=2, deepstack_layers=deepstack, window_pixels=64,
        full_layers=(1, 3), **widths,
    )}  # fmt: skip
    if audio:
        encoders["audio"] = ClipsEncoder(frames=64, mel_bins=16, **widths)
    language = LanguageConfig(
        layers=4, hidden_size=128, heads=4, kv_heads=2, ffn_hidden_size=256, vocab_size=640
    )
    return ModelConfig(name="images", encoders=encoders, language=language, chat_template="qwen2.5")


def request(parallel: Parallel, *, count: int = 120, audio: bool = False, **changes) -> PlanRequest:
    """Return a request for data-parallel encoders, and samples with zero to three images."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 4, count)
    images = [np.exp(rng.normal(4, 1, number)).astype(int) + 1 for number in numbers]
    cells = np.array([own.sum() for own in images])
    clips = rng.integers(0, 4, count) * audio
    tokens = cells + rng.integers(5, 90, count) + 16 * clips
    sums = {"image_tokens": cells, "squared_image_tokens": [(own**2).sum() for own in images]}
    sums |= {"clips": clips} if audio else {}
    lengths = lengths_of(tokens=tokens, loss_tokens=np.full(count, 4), **sums)
    largest = int(tokens.max())
    caps = {"image_tokens": largest, "tokens": 2 * largest} | ({"clips": 12} if audio else {})
    given = {"precision": "bf16", "cluster": CLUSTER, "model": images_model(audio=audio)} | changes
    job = JobSpec(parallel=parallel, placement=EncoderPlacement.DATA_PARALLEL, **given)
    level = Level(caps=Caps.of(**caps))
    data = SampleData(lengths=lengths, levels=(level,), packs_per_step=4 * parallel.data)
    return PlanRequest(job=job, data=data)


@dataclass(frozen=True)
class Walk:
    """Samples and passes of every rank in a step, from plain loops."""

    job: JobSpec
    cost: EncodersCost
    workload: Workload
    lengths: Lengths

    @property
    def choice(self) -> DataParallelEncoders:
        return self.job.data_parallel_encoders

    def samples_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a group's samples with images, and their pipelines."""
        load = self.workload
        homes = (load.dp_rank - block * self.choice.pipelines).tolist()
        found = [
            (int(sample), home)
            for home, samples in zip(homes, load.samples["image_tokens"].rows, strict=True)
            for sample in samples
            if 0 <= home < self.choice.pipelines
        ]
        return tuple(np.array(found, np.int64).reshape(-1, 2).T)

    def squares_of(self, samples: list[int] | np.ndarray) -> np.ndarray:
        """Return cells and squares of the samples' images."""
        return self.lengths.sizes(["image_tokens", "squared_image_tokens"])[:, samples]

    def ms(self, samples: np.ndarray) -> np.ndarray:
        cells, squares = self.squares_of(samples)
        return self.choice.item_ms["vision"] * cells + self.choice.square_ms["vision"] * squares

    @property
    def unit_ms(self) -> float:
        return (self.choice.item_ms["vision"] + self.choice.square_ms["vision"]) / 2**20

    def ranks_of(self, block: int) -> tuple[list[list[int]], list[int]]:
        """Return each rank's samples in a group, and its load in units."""
        samples, homes = self.samples_of(block)
        weight = np.maximum(np.rint(self.ms(samples) / self.unit_ms), 1).astype(np.int64)
        of_pipeline = self.cost.ranks_of_pipeline
        rank = deal_group(weight, homes, self.choice.pipelines, of_pipeline)
        ranks = self.choice.pipelines * of_pipeline
        loads = np.bincount(rank, weight, ranks).astype(int).tolist()
        return [samples[rank == each].tolist() for each in range(ranks)], loads

    def image_passes(self, samples: list[int]) -> dict[bool, list[tuple[int, int]]]:
        """Return cells and squares of a rank's passes: kept and not kept."""
        a_pass, kept = self.choice.items_per_pass["vision"], self.choice.kept_items["vision"]
        found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        before = 0
        for cells, square in self.squares_of(samples).T.tolist():
            before += cells
            passes = found[before <= kept]
            if passes and passes[-1][0] + cells <= a_pass:
                passes[-1] = (passes[-1][0] + cells, passes[-1][1] + square)
            else:
                passes.append((cells, square))
        return found

    def clip_runs(self, block: int, load: list[int]) -> tuple[ItemRuns, np.ndarray]:
        """Return runs of a group's clips, and the pipeline of every pack."""
        own = self.workload.rows(self.workload.dp_rank // self.choice.pipelines == block)
        home = own.dp_rank - block * self.choice.pipelines
        clips = own.features[:, list(self.job.cost.features).index("clips")].astype(np.int64)
        runs = share_items(
            {"audio": clips}, home, pipelines=self.choice.pipelines,
            ranks_of_pipeline=self.cost.ranks_of_pipeline, item_ms=self.choice.item_ms,
            load=np.array([load]), unit_ms=self.unit_ms,
            node=ranks_of_group(self.cost, self.choice.pipelines, block) // self.cost.gpus_per_node,
        )  # fmt: skip
        return runs["audio"], home

    def clip_passes(self, block: int, load: list[int]) -> list[Passes]:
        """Return clips per pass of every rank; clips even out the images' load."""
        runs, _ = self.clip_runs(block, load)
        counts = np.bincount(runs.rank, runs.count, len(load)).astype(int)
        return [equal_passes(self.choice, "audio", items) for items in counts.tolist()]


def walks(asked: PlanRequest, choice, packs: ScheduledPacks) -> Iterator[Walk]:
    job = replace(asked.job, data_parallel_encoders=choice)
    workload = job.workload(packs, asked.data.lengths, asked.data.levels)
    cost = asked.job.encoders_costs[choice.sharded]
    for step in np.unique(workload.step).tolist():
        yield Walk(job, cost, workload.of_steps([step]), asked.data.lengths)


BELOW = {"vision": (400, 600), "audio": (4, 6)}
CASES = [
    (Parallel(pipeline=2, data=2), False, False),
    (Parallel(pipeline=1, data=4), False, True),
    (Parallel(tensor=2, pipeline=2, data=2), False, True),
    (Parallel(pipeline=2, data=2), True, False),
    (Parallel(pipeline=1, data=4), True, True),
]


@pytest.mark.parametrize(("parallel", "audio", "divided"), CASES)
def test_waits_are_those_of_the_busiest_rank(parallel, audio, divided) -> None:
    """Prevents a pass, squares or second forwards left out, sharded ranks that do not wait for the
    longest pass, and clips assigned regardless of images."""
    ways = tuple(WeightSharding) if divided else (WeightSharding.REPLICATED,)
    asked = request(parallel, audio=audio, encoder_shardings=ways)
    packs, _ = asked.data.schedule(asked.job)
    for seed in range(6):
        choice = random_choice(np.random.default_rng(seed), asked.job.encoders_costs, BELOW)
        for walk in walks(asked, choice, packs):
            groups = range(parallel.data // choice.pipelines)
            dealt = [walk.ranks_of(block) for block in groups]
            passes = {"vision": [[walk.image_passes(own) for own in each] for each, _ in dealt]}
            if audio:
                passes["audio"] = [walk.clip_passes(block, dealt[block][1]) for block in groups]
            busiest = ranks_ms(walk.cost, choice.pipelines, passes)[0].max(axis=1)
            columns = [walk.job.cost.features.index(name) for name in ENCODER_WAITS_MS]
            found = np.zeros((parallel.data, 2))
            np.add.at(found, walk.workload.dp_rank, walk.workload.features[:, columns])
            # The exchange is added; it is equal for a group's pipelines.
            besides = found - np.repeat(busiest, choice.pipelines, axis=0)
            once = [walk.cost.gather_ms, walk.cost.reduction_ms]
            assert (besides >= np.array(once) - 1e-9).all()
            expected = np.array([exchange_ms(walk, block) for block in groups]) + once
            np.testing.assert_allclose(besides, np.repeat(expected, choice.pipelines, axis=0),
                                       rtol=1e-6, atol=1e-9)  # fmt: skip


def exchange_ms(walk: Walk, block: int) -> list[float]:
    """Return the time of both exchanges of a group, from all senders and receivers."""
    cost, sizes = walk.cost, walk.job.parallel
    samples, load = walk.ranks_of(block)
    size, of_pipeline = len(samples), cost.ranks_of_pipeline
    if size == 1:
        return [0.0, 0.0]
    held, moved = np.zeros(walk.choice.pipelines), []
    every, homes = walk.samples_of(block)
    home_of = dict(zip(every.tolist(), homes.tolist(), strict=True))
    one = cost.encoders["vision"]
    for rank, own in enumerate(samples):
        for sample in own:
            rows = float(walk.lengths.column("image_tokens")[sample]) * one.feature_bytes
            held[home_of[sample]] += rows
            for shard in range(sizes.tensor):
                target = home_of[sample] * of_pipeline + shard
                moved.append((rank, target, rows / sizes.tensor))
    if "audio" in cost.encoders:
        runs, home = walk.clip_runs(block, load)
        for pack, count, source in zip(runs.pack, runs.count, runs.rank, strict=True):
            rows = count * cost.encoders["audio"].feature_bytes
            held[home[pack]] += rows
            moved.append((source, home[pack] * of_pipeline, rows))
    both = messages_ms(cost, walk.choice.pipelines, block, moved)
    if sizes.tensor == 1:
        return [both, both]
    gathered = held.max() * (sizes.tensor - 1) / sizes.tensor
    return [both + cost.tensor.fixed_ms + cost.tensor.each_ms * gathered, both]


@pytest.mark.parametrize("frozen", [(), ("vision", "projector")], ids=["", "frozen"])
def test_memory_is_that_of_the_fullest_rank(frozen: tuple[str, ...]) -> None:
    """Prevents too little memory for long samples, inputs, activations or deepstack features."""
    asked = request(Parallel(pipeline=2, data=2), frozen=frozen)
    packs, lengths = asked.data.schedule(asked.job)
    workload = asked.job.workload(packs, lengths, asked.data.levels)
    for seed in range(10):
        choice = random_choice(np.random.default_rng(seed), asked.job.encoders_costs, BELOW)
        [cost] = asked.job.encoders_costs.values()
        shares = ItemShares.build(workload, asked.job.cost.features, cost, choice)
        found, one = memory_of_encoders(shares, cost, choice), cost.encoders["vision"]
        trained = not frozen
        kept, rows, held, peak = [0.0], [0.0], [0.0], [0.0]
        for walk in walks(asked, choice, packs):
            for block in range(2 // choice.pipelines):
                samples, _ = walk.ranks_of(block)
                for own in samples:
                    passes = walk.image_passes(own)
                    cells = {is_kept: sum(n for n, _ in passes[is_kept]) for is_kept in passes}
                    rows.append(sum(cells.values()) * one.feature_bytes)
                    inputs = cells[False] * one.input_bytes * trained
                    activations = sum(one.kept_bytes @ (1, *work) for work in passes[True])
                    kept.append(activations * trained + inputs)
                    # Two orders of rows, or a pass on top of one order and kept activations.
                    peak.append(kept[-1] + 2 * rows[-1])
                    for is_kept, works in passes.items():
                        for work in works:
                            working = (one.working_bytes @ (1, *work)).max() + rows[-1]
                            if not trained:
                                peak.append(working + one.input_bytes * work[0])
                            elif is_kept:
                                peak.append(kept[-1] + working)
                            else:
                                peak.append(inputs + working + one.kept_bytes @ (1, *work))
                every, homes = walk.samples_of(block)
                cells_of = walk.lengths.column("image_tokens")[every]
                held += [cells_of[homes == home].sum() * one.feature_bytes
                         for home in range(choice.pipelines)]  # fmt: skip
        assert found.kept == pytest.approx(max(kept))
        assert found.kept + found.encoding == pytest.approx(max(peak))
        assert found.features == pytest.approx((1 + trained) * max(held))
        assert found.features + found.arrival == pytest.approx(2 * max(held))


def test_features_are_as_wide_as_what_language_layers_take() -> None:
    """Prevents deepstack features left out of exchanged and stored bytes."""
    plain, deep = images_model(deepstack=()), images_model()
    costs = [encoders_cost(model, CLUSTER, Parallel(pipeline=2, data=2), "bf16").encoders["vision"]
             for model in (plain, deep)]  # fmt: skip
    assert costs[0].feature_bytes == 128 * 2
    assert costs[1].feature_bytes == 3 * costs[0].feature_bytes
    assert costs[1].input_bytes == 4 * 3 * 2 * 16**2 * 4
    assert (costs[0].forward_ms > 0).all() and costs[0].is_of_samples


def test_a_pipeline_without_encoders_carries_deepstack_features() -> None:
    """Prevents omitting deepstack features from bytes sent between the first language layers."""
    model = images_model()
    alone = model.without_encoders()
    language = [name for name in unit_names(model) if not name.startswith(("vision", "projector"))]
    assert list(unit_names(alone)) == language
    assert [kind.carried for kind in unit_kinds(alone)] == [2, 1, 0, 0]
    assert deepstack_of(alone) == deepstack_of(model)
    assert alone.without_encoders() == alone
    job = request(Parallel(pipeline=2, data=2)).job
    carrying = job.cost.units["language_layer_carrying1"]
    plain, column = job.cost.units["language_layer"], job.cost.features.index("image_tokens")
    assert carrying.output_bytes[column] - plain.output_bytes[column] == 128 * 2
    gradients = carrying.output_gradient_bytes - plain.output_gradient_bytes
    assert gradients[column] == 128 * 2


def test_search_finds_the_fastest_choice() -> None:
    """Prevents a choice slower than another of the grid, or a bound above the optimum."""
    asked = request(Parallel(pipeline=2, data=2), count=16)
    problem = placement_problem(asked.job, asked.workload(), asked.data.levels)
    choices = list(every_choice(problem, 256))
    works = [problem.with_encoders(choice) for choice in choices]
    least = [min_peak_of_splits(replace(problem.task, workload=workload)) for workload in works]
    # All choices fit, or only some.
    for cap in (np.inf, float(np.quantile(least, 0.6))):
        least_ms, left_out = np.inf, 0
        for choice in choices:
            task = replace(problem.make_stage_task(choice), memory_cap_bytes=cap)
            try:
                found = search_stages(task)
                least_ms = min(least_ms, found.step_ms)
            except DoesNotFit:
                left_out += 1
        capped = replace(problem, task=replace(problem.task, memory_cap_bytes=cap))
        _, found = search_encoders(capped)
        assert found.step_ms == pytest.approx(least_ms, rel=1e-9)
        assert found.lower_bound_ms <= least_ms * (1 + 1e-9)
        assert (left_out > 0) == (cap < np.inf)


def test_plans_are_written_checked_and_counted_anew_where_they_are_edited(tmp_path: Path) -> None:
    """Prevents plans that fail the check, edits without effect, and wrong encoders' squares."""
    result = make_plan(request(Parallel(pipeline=2, data=2)))
    save_plan(result, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    path = tmp_path / "plan" / PLAN_FILE
    written = json.loads(path.read_text())
    encoders = written["data_parallel_encoders"]
    assert encoders["square_ms"]["vision"] > 0
    for changed, told in (
        ({"kept_items": {"vision": 7}}, "prediction"),
        ({"pipelines": 1 if encoders["pipelines"] == 2 else 2}, "prediction"),
        ({"square_ms": {}}, "data_parallel_encoders.square_ms has no encoder"),
        ({"square_ms": {"vision": 1.0, "audio": 1.0}}, "_encoders.square_ms has audio and vision"),
    ):
        path.write_text(json.dumps(written | {"data_parallel_encoders": encoders | changed}))
        with pytest.raises(UserError, match=told):
            check_plan(tmp_path / "plan")
    edited = written | {"data_parallel_encoders": encoders | {"kept_items": {"vision": 0}}}
    del edited["prediction"]
    path.write_text(json.dumps(edited))
    check_plan(tmp_path / "plan")


def test_phases_are_those_of_samples_dealt() -> None:
    """Prevents counting cells alike in images of any size, and a bound above the assigned load."""
    asked = request(Parallel(pipeline=2, data=2), count=200)
    result = make_plan(asked)
    assert result.data is not None
    [vision, _] = phases_of_plan(result)
    busiest = mean = least = 0.0
    for walk in walks(asked, result.plan.data_parallel_encoders, result.data[0]):
        groups = 2 // walk.choice.pipelines
        loads = [sum(walk.ms(np.array(own, np.int64)))
                 for block in range(groups) for own in walk.ranks_of(block)[0]]  # fmt: skip
        every = np.concatenate([walk.samples_of(block)[0] for block in range(groups)])
        busiest, mean = busiest + max(loads), mean + np.mean(loads)
        least += load_bound(walk.ms(every), len(loads))
    assert vision.imbalance_after == pytest.approx(busiest / mean, rel=1e-3)
    assert vision.bound == pytest.approx(least / mean, rel=1e-3)
    assert vision.bound <= vision.imbalance_after <= vision.imbalance_before
