"""One rank replayed alone, against the same rank in a full job."""

import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from chunk_cases import CUTS, chunk_plan, with_chunks
from length_cases import lengths_of
from pipeline_cases import MODEL, TIED, pipeline_plan
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_plan, toy_text_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure import stage_replay as replay_module
from megatron.vlm.measure.profiler import peak_activation_bytes
from megatron.vlm.measure.random_batches import random_batch
from megatron.vlm.measure.replay_job import load_replay, replay_info, replay_stages
from megatron.vlm.measure.stage_replay import (
    StageReplayer,
    act_as_stage,
    random_rows,
    state_bytes_of,
)
from megatron.vlm.run.launch import RankLaunch, open_store
from megatron.vlm.step import clock
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.job.plan import read_plan, write_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.job.replay import REPLAY_FILES, read_replay
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.pack_settings import PackSettings
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage_units import merge_spans
from tests.planner.plan_cases import request

pytestmark = pytest.mark.in_own_process

SIZES = [(3, (20, 40), 7), (1, (30,), 30), (4, (50, 9, 41), 1), (2, (35,), 4), (0, (25,), 5)]
TEXT = toy_text_model(qkv_bias=True, tied_head=True, vocab_size=51)
ALONE = {
    "pp2-dp2": pipeline_plan(6, vision=(1,), data=2),
    "pp3-tp2-sequence": pipeline_plan(
        3, 6, vision=(0, 3), language=(1, 2), tensor=2, sequence_parallel=True
    ),
    "frozen-vision": pipeline_plan(3, language=(0,), frozen=("vision",)),
    "frozen-but-named": pipeline_plan(6, vision=(1,), frozen=("vision",)),
    "tied-head-apart": pipeline_plan(3, 7, model=TIED, language=(0, 2)),
    "tied-head-in-one-stage": pipeline_plan(4, model=TIED, data=2),
    "interleaved": chunk_plan(MODEL, 2, 2),
    "interleaved-4-frozen": with_chunks(pipeline_plan(*CUTS[8], frozen=("vision",)), 4),
    "zb-v": chunk_plan(MODEL, 2, 2, name="zb-v"),
    "zb-v-tied": chunk_plan(TIED, 2, 2, name="zb-v"),
    "zb-h1": with_chunks(pipeline_plan(6), 1, "zb-h1"),
    "text-tied-head-alone": toy_plan(TEXT, stages_of(TEXT, 1, 3, language=(1,))),
}


def random_batches(stage, model=MODEL):
    return [
        random_batch(model, tiles * model.takes_images, *sizes, stage) for tiles, *sizes in SIZES
    ]


def bytes_of_rank(links, plan):
    """Return a real rank's state bytes after a step, and its peak activation bytes."""
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=0)
    batches = random_batches(plan.units_of(links.rank), plan.model)

    def step():
        train_step(trainer, MicroBatchStream.of(batches))

    step()
    return state_bytes_of(trainer), peak_activation_bytes(trainer, step)


@pytest.mark.parametrize("plan", ALONE.values(), ids=ALONE)
def test_a_rank_alone_needs_what_it_needs_in_the_job(plan):
    """Prevents plans that fit in a replay but not in training; bytes must be equal."""
    ranks = run_ranks(plan.parallel, bytes_of_rank, plan)
    per_stage = plan.parallel.world_size // plan.parallel.pipeline
    for number in range(plan.parallel.pipeline):
        with act_as_stage(plan.parallel, number) as links:
            replayer = StageReplayer(plan, links)
            batches = random_batches(plan.units_of(number), plan.model)
            kept_bytes = replayer.activation_bytes(batches)
        assert (replayer.state_bytes, kept_bytes) == ranks[number * per_stage]


@pytest.fixture
def own_clock(monkeypatch):
    """Measure CPU time, as wall time includes waiting on a busy machine."""
    for module in (clock, replay_module):
        monkeypatch.setattr(module, "record_moment", time.thread_time)


def min_pass_ms(plan, count, places):
    """Yield minimal times of a step of `count` packs with one large pack, by its place."""
    large, small = random_batch(MODEL, 200, (4000,), 50), random_batch(MODEL, 2, (40,), 5)
    with act_as_stage(plan.parallel, 1) as links:
        replayer = StageReplayer(plan, links)
        replayer.step([small, large])
        for place in places:
            batches = [large if place == i else small for i in range(count)]
            # Three steps, as the first touch of a page is charged to the touching thread.
            steps = [replayer.step(batches) for _ in range(3)]
            assert all((timing.recompute_ms < timing.backward_ms).all() for timing in steps)
            names = ("forward_ms", "backward_ms", "recompute_ms", "weight_ms")
            yield (
                place,
                {n: np.min([getattr(timing, n) for timing in steps], axis=0) for n in names},
            )


@pytest.mark.parametrize(
    "again", [{}, {"vision": range(4), "language": range(3)}], ids=["kept", "recomputed"]
)
def test_times_belong_to_the_micro_batches_that_took_them(own_clock, again):
    """Prevents times of forward, backward or recomputation counted for another micro-batch."""
    for place, times in min_pass_ms(pipeline_plan(3, 7, **again), 5, (0, 2, 4)):
        for name in ("forward_ms", "backward_ms"):
            assert times[name].shape == (5,) and times[name].argmax() == place
        again_ms = times["recompute_ms"]
        assert again_ms.argmax() == place if again else not again_ms.any()


def test_times_belong_to_the_chunks_that_took_them(own_clock):
    """Prevents swapping times of chunks or of backward parts."""
    # This stage has four vision layers, then a projector, which is far cheaper.
    plan = with_chunks(pipeline_plan(1, 5, 6), 2, "zb-v")
    for place, times in min_pass_ms(plan, 4, (0, 3)):
        for name in ("forward_ms", "backward_ms", "weight_ms"):
            own_ms = times[name].reshape(4, 2)
            assert own_ms[:, 0].argmax() == place and own_ms[place, 0] > own_ms[place, 1]


def test_neighbours_send_when_it_is_predicted(plan_folder, monkeypatch):
    """Prevents a replayed stage that never waits, or waits at other points than scheduled."""
    slept = []
    monkeypatch.setattr(replay_module.time, "sleep", lambda seconds: slept.append(1e3 * seconds))
    plan = pipeline_plan(3, 7)
    with act_as_stage(plan.parallel, 1) as links:
        replayer = StageReplayer(plan, links)
        replayer.step(random_batches(plan.stages[1])[:3], (1.0, 2.0, 10.0, 3.0, 20.0, 30.0))
        assert slept == pytest.approx([1, 2, 10, 3, 20, 30])
        replayer.step(random_batches(plan.stages[1])[:3])
        assert not any(slept[6:])
    job = load_replay(plan_folder, None, None)
    info = replay_info(job, steps=1, repetitions=1)
    for stage in range(2):
        work = job.work_of(stage, info)
        for rows, waits_ms in zip(work.steps, work.waits_ms, strict=True):
            assert len(waits_ms) == 2 * len(rows)
        # The last stage waits for the first micro-batch, the first stage does not.
        assert (work.waits_ms[0][0] > 0) == bool(stage)


def test_replaying_changes_no_weight():
    """Prevents weights that diverge on random gradients or are overwritten by a gather."""
    plan = pipeline_plan(6, data=2)
    with act_as_stage(plan.parallel, 1) as links:
        torch.manual_seed(3)
        trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=0, origin="measured")
        before = [weight.detach().clone() for weight in trainer.stage.parameters()]
        torch.manual_seed(3)
        replayer = StageReplayer(plan, links)
        for _ in range(2):
            replayer.step(random_batches(plan.stages[1]))
            replayer.update_ms()
        after = list(replayer.trainer.stage.parameters())
    assert len(after) == len(before) and all(map(torch.equal, after, before))


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory):
    return save_planned(tmp_path_factory.mktemp("planned") / "plan")


def save_planned(directory, *levels):
    """Save a plan of two stages and two ranks, with packing levels (tokens, context size)."""
    rng = np.random.default_rng(0)
    tiles, text = rng.integers(0, 5, 60), rng.integers(4, 30, 60)
    tokens = tiles * MODEL.vision.tokens_per_item + text
    cluster = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4})
    asked = request(
        model=MODEL, cluster=cluster, packs_per_step=6,
        lengths=lengths_of(tiles=tiles, tokens=tokens, loss_tokens=text // 2),
    )  # fmt: skip
    own_levels = tuple(
        Level(caps=Caps.of(tiles=8, tokens=most), context=context)
        for most, context in levels or [(120, 1)]
    )
    data = replace(asked.data, levels=own_levels, settings=PackSettings())
    save_plan(make_plan(replace(asked, data=data)), directory)
    return directory


def replay(plan_folder, output, stages, steps=2):
    launch = RankLaunch(rank=0, world_size=1, local_rank=0)
    job = load_replay(plan_folder, None, None)
    info = replay_info(job, steps=steps, repetitions=2)
    replay_stages(job, info, stages, output, launch, open_store(launch))
    return job


def test_a_stopped_replay_goes_on(plan_folder, tmp_path):
    """Prevents restarting a long replay from scratch, or mixing two settings in one."""
    output = tmp_path / "replay"
    job = replay(plan_folder, output, [0])
    with pytest.raises(UserError, match="stage 1 is not replayed yet"):
        read_replay(output, job.plan, job.cost, job.workload)
    first = REPLAY_FILES.file_of(output, 0).read_bytes()
    with pytest.raises(UserError, match="another steps"):
        replay(plan_folder, output, [1], steps=1)
    replay(plan_folder, output, [0, 1])
    assert REPLAY_FILES.file_of(output, 0).read_bytes() == first
    summary = read_replay(output, job.plan, job.cost, job.workload)
    assert len(summary.each_step_ms) == 2
    stages = REPLAY_FILES.read_stages(output, len(job.plan.stages))
    rows = np.flatnonzero(np.isin(job.packs.step, summary.info.steps))
    for stage, replayed in enumerate(stages):
        assert np.array_equal(replayed.rows, rows)
        # A step takes at least its busiest stage's compute time.
        busy_ms = np.sum(replayed.forward_ms) + np.sum(replayed.backward_ms)
        assert summary.each_step_ms.sum() >= busy_ms / 2 > 0
        predicted = replayed.predicted_gib(job.plan.prediction.stages[stage].memory)
        # Analytic costs do not model what CPU kernels save.
        assert replayed.peak_gib == pytest.approx(predicted, rel=0.5)


def test_one_stage_out_of_memory_costs_the_others_nothing(plan_folder, tmp_path, monkeypatch):
    """Prevents losing other stages' results if one runs out of memory, and memory leaks."""
    output, built = tmp_path / "replay", []

    class Failing(StageReplayer):
        def __init__(self, plan, links, provider):
            super().__init__(plan, links, provider=provider)
            built.append(weakref.ref(self.trainer.stage))
            assert all(earlier() is None for earlier in built[:-1])

        def step(self, batches, waits_ms=()):
            if self.trainer.links.rank == 0:
                raise torch.OutOfMemoryError("Tried to allocate 7 GiB")
            return super().step(batches, waits_ms)

    monkeypatch.setattr(replay_module, "StageReplayer", Failing)
    with pytest.raises(UserError, match=r"stage 0 needs more .*Tried to allocate 7 GiB"):
        replay(plan_folder, output, [0, 1])
    assert [timing.stage for timing in REPLAY_FILES.read_stages(output, 2)] == [1]
    assert len(built) == 2


def test_random_content_has_the_packs_sizes(plan_folder):
    """Prevents replaying micro-batches of sizes other than planned."""
    job = load_replay(plan_folder, None, None)
    load = random_rows(job.plan, 1, job.packs, job.lengths)
    packs = job.packs
    for row, batch in enumerate(load(np.arange(len(packs)))):
        assert (batch.tiles, batch.tokens) == (packs.column("tiles")[row], packs.tokens[row])
        assert sum(batch.segment_tokens) == batch.tokens and batch.pixels_TCPP is None
        assert len(batch.labels_L) == job.lengths.loss_tokens[packs.packs[row]].sum()


def test_what_cannot_be_replayed_is_refused(plan_folder, tmp_path):
    """Prevents samples of other data, and a rank that waits for other ranks' shards."""
    shared, meta = save_planned(tmp_path / "plan", (30, 1), (120, 2)), tmp_path / "meta.json"
    for directory, data, message in (
        (plan_folder, (meta, None), "give both"),
        (plan_folder, (meta, tmp_path / "tokenizer.model"), "names no data"),
        (shared, (None, None), "ranks share packs"),
    ):
        with pytest.raises(UserError, match=message):
            load_replay(directory, *data)


def test_every_level_recomputes_its_own_layers(tmp_path):
    """Prevents applying one packing level's recomputation to packs of other levels."""
    directory = save_planned(tmp_path / "plan", (30, 1), (120, 1))
    plan = read_plan(directory)
    again = tuple(
        merge_spans(layer for span in stage.units for layer in span.units if layer.layers)
        for stage in plan.stages
    )
    levels = tuple(
        level.model_copy(update={"recompute": recompute})
        for level, recompute in zip(plan.levels, (((), ()), again), strict=True)
    )
    write_plan(plan.model_copy(update={"levels": levels, "prediction": None}), directory)
    job = replay(directory, tmp_path / "replay", [0, 1])
    packs = job.packs
    summary = read_replay(tmp_path / "replay", job.plan, job.cost, job.workload)
    for stage in summary.stages:
        level, again_ms = packs.level[list(stage.rows)], np.array(stage.recompute_ms)
        assert set(level) == {0, 1} and np.array_equal(again_ms > 0, level == 1)
    assert summary.lost.recompute_ms > 0
    for load in (job.rows_of(0), job.rows_of(1)):
        assert [batch.level for batch in load(np.arange(len(packs)))] == packs.level.tolist()


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_plans_of_any_schedule_are_replayed(tmp_path, name, chunks):
    """Prevents swapping times of chunks or of backward parts in any schedule."""
    directory = save_planned(tmp_path / "plan")
    cuts = CUTS[4] if chunks == 2 else (6,)
    schedule = PipelineSchedule(name=name, chunks=chunks)
    changed = {"stages": tuple(stages_of(MODEL, *cuts, language=(0,))), "schedule": schedule}
    changed["prediction"] = None
    write_plan(read_plan(directory).model_copy(update=changed), directory)
    job = replay(directory, tmp_path / "replay", [0, 1])
    summary = read_replay(tmp_path / "replay", job.plan, job.cost, job.workload)
    recomputing = next(part for part, stage in enumerate(job.plan.stages) if stage.recompute)
    for stage, parts in zip(summary.stages, schedule.parts_of(len(cuts) + 1), strict=True):
        assert len(stage.weight_ms) == (0 if name == "interleaved" else len(stage.backward_ms))
        late_ms = stage.weight_ms or [0.0] * len(stage.backward_ms)
        each_ms = stage.recompute_ms, stage.backward_ms, late_ms
        again_ms, backward_ms, weight_ms = np.reshape(each_ms, (3, len(stage.rows), chunks))
        for chunk, part in enumerate(parts):
            assert (again_ms[:, chunk] > 0).all() == (part == recomputing)
        assert (backward_ms > weight_ms + again_ms).all() and (np.min(stage.forward_ms) > 0)
    busy_ms = summary.forward_ms + summary.backward_ms
    assert summary.step_ms > busy_ms.max() > 0
