"""One rank of a job alone, against the same rank among the others."""

import time
import weakref

import numpy as np
import pytest
import torch
from chunk_cases import CUTS, with_chunks
from length_cases import lengths_of
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure import replay as replay_module
from megatron.vlm.measure.profiler import peak_activation_bytes, random_batch
from megatron.vlm.measure.replay import (
    StageReplayer,
    random_rows,
    standing_in,
    state_bytes_of,
)
from megatron.vlm.measure.replay_job import ReplayOptions, load_replay, replay_info, replay_stages
from megatron.vlm.run.launch import Launch, open_store
from megatron.vlm.step import clock
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan import read_plan, write_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.job.replay import REPLAY_FILES, read_replay
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage import joined

pytestmark = pytest.mark.in_own_process

MODEL = toy_model()
FROZEN = {"frozen": ("vision",)}
TIED = {
    "model": MODEL.model_copy(
        update={"language": MODEL.language.model_copy(update={"tied_head": True})}
    )
}
SIZES = [(3, (20, 40), 7), (1, (30,), 30), (4, (50, 9, 41), 1), (2, (35,), 4), (0, (25,), 5)]


def batches_for(stage):
    return [random_batch(MODEL, *sizes, stage) for sizes in SIZES]


def bytes_of_rank(links, plan):
    """Of a real rank: state after a step, and the most that a step keeps."""
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=0)
    batches = batches_for(plan.units_of(links.rank))

    def step():
        train_step(trainer, MicroBatchStream.of(batches))

    step()
    return state_bytes_of(trainer), peak_activation_bytes(trainer, step)


@pytest.mark.parametrize(
    ("cuts", "recompute", "sizes", "changes"),
    [
        pytest.param((6,), {"vision": (1,)}, {"data": 2}, {}, id="pp2-dp2"),
        pytest.param(
            (3, 6),
            {"vision": (0, 3), "language": (1, 2)},
            {"tensor": 2, "sequence_parallel": True},
            {},
            id="pp3-tp2-sequence",
        ),
        pytest.param((3,), {"language": (0,)}, {}, FROZEN, id="frozen-vision"),
        pytest.param((6,), {"vision": (1,)}, {}, FROZEN, id="frozen-but-named"),
        pytest.param((3, 7), {"language": (0, 2)}, {}, TIED, id="tied-head-apart"),
        pytest.param((4,), {}, {"data": 2}, TIED, id="tied-head-in-one-stage"),
    ],
)
def test_a_rank_alone_needs_what_it_needs_in_the_job(cuts, recompute, sizes, changes):
    """Prevents: a plan that fits when its stages are tried alone, and not when they train.

    State and kept activations of every stage, to the byte.
    """
    stages = stages_of(MODEL, *cuts, **recompute)
    ranks_alone(toy_plan(MODEL, stages, **sizes).model_copy(update=changes))


def ranks_alone(plan):
    """Check every stage alone against a rank of it in the job."""
    ranks = run_ranks(plan.parallel, bytes_of_rank, plan)
    per_stage = plan.parallel.world_size // plan.parallel.pipeline
    for number in range(plan.parallel.pipeline):
        with standing_in(plan.parallel, number) as links:
            replayer = StageReplayer(plan, links)
            batches = batches_for(plan.units_of(number))
            alone = replayer.state_bytes, replayer.activation_bytes(batches)
        assert alone == ranks[number * per_stage]


@pytest.mark.parametrize(
    ("model", "name", "chunks", "changes"),
    [
        pytest.param(MODEL, "interleaved", 2, {}, id="interleaved"),
        pytest.param(MODEL, "interleaved", 4, FROZEN, id="interleaved-4-frozen"),
        pytest.param(MODEL, "zb-v", 2, {}, id="zb-v"),
        pytest.param(TIED["model"], "zb-v", 2, {}, id="zb-v-tied"),
        pytest.param(MODEL, "zb-h1", 1, {}, id="zb-h1"),
    ],
)
def test_a_rank_of_any_schedule_alone_needs_what_it_needs_in_the_job(model, name, chunks, changes):
    """Prevents: the memory of one chunk for that of a stage, or backwards in two parts that keep
    less when a stage is tried alone."""
    stages = stages_of(model, *CUTS.get(2 * chunks, (6,)))
    plan = with_chunks(toy_plan(model, stages), chunks, name)
    ranks_alone(plan.model_copy(update=changes))


def test_times_belong_to_the_micro_batches_that_took_them(monkeypatch):
    """Prevents: forwards, backwards and recomputation that are counted to another micro-batch.

    One pack is 40 times as large as the others, in one place after another; and every layer is
    recomputed, or none.
    """
    # Of the processor, as a busy machine may keep any micro-batch waiting.
    monkeypatch.setattr(clock, "moment", time.thread_time)
    monkeypatch.setattr(replay_module, "moment", time.thread_time)
    large, small = random_batch(MODEL, 200, (4000,), 50), random_batch(MODEL, 2, (40,), 5)
    everything = {"vision": (0, 1, 2, 3), "language": (0, 1, 2)}
    for recompute in ({}, everything):
        plan = toy_plan(MODEL, stages_of(MODEL, 3, 7, **recompute))
        with standing_in(plan.parallel, 1) as links:
            replayer = StageReplayer(plan, links)
            replayer.step([small, large])
            for place in (0, 2, 4):
                batches = [large if place == i else small for i in range(5)]
                # The least of three steps: a page that is touched for the first time is charged
                # to the thread that touches it.
                steps = [replayer.step(batches) for _ in range(3)]
                for each_ms in ([s.forward_ms for s in steps], [s.backward_ms for s in steps]):
                    least_ms = np.min(each_ms, axis=0)
                    assert least_ms.shape == (5,) and least_ms.argmax() == place
                assert all((s.recompute_ms < s.backward_ms).all() for s in steps)
                again_ms = np.min([s.recompute_ms for s in steps], axis=0)
                assert again_ms.argmax() == place if recompute else not again_ms.any()


def test_neighbours_send_when_it_is_predicted(planned, monkeypatch):
    """Prevents: a stage that never stands idle, or not where the schedule has it wait."""
    slept = []
    monkeypatch.setattr(replay_module.time, "sleep", lambda seconds: slept.append(1e3 * seconds))
    plan = toy_plan(MODEL, stages_of(MODEL, 3, 7))
    waits_ms = (1.0, 2.0, 10.0, 3.0, 20.0, 30.0)
    with standing_in(plan.parallel, 1) as links:
        replayer = StageReplayer(plan, links)
        replayer.step(batches_for(plan.stages[1])[:3], waits_ms)
        assert slept == pytest.approx([1, 2, 10, 3, 20, 30])
        replayer.step(batches_for(plan.stages[1])[:3])
        assert not any(slept[6:])
    job = load_replay(planned, None, None)
    info = replay_info(job, ReplayOptions(steps=1, repetitions=1), processes=1)
    for stage in range(2):
        work = job.work_of(stage, info)
        for rows, waits_ms in zip(work.steps, work.waits_ms, strict=True):
            assert len(waits_ms) == 2 * len(rows)
        first = work.waits_ms[0][0]
        # The last stage waits for the first micro-batch, and the first one for nothing.
        assert first > 0 if stage else first == 0


def test_replaying_changes_no_weight():
    """Prevents: weights that run away on made-up gradients, until nothing is finite, or that are
    overwritten where a rank alone gathers those of others."""
    plan = toy_plan(MODEL, stages_of(MODEL, 6), data=2)
    with standing_in(plan.parallel, 1) as links:
        trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=0)
        before = [weight.detach().clone() for weight in trainer.stage.parameters()]
        replayer = StageReplayer(plan, links)
        for _ in range(2):
            replayer.step(batches_for(plan.stages[1]))
            replayer.update_ms()
        for weight, old in zip(replayer.trainer.stage.parameters(), before, strict=True):
            assert torch.equal(weight, old)


@pytest.fixture
def planned(tmp_path):
    """A plan of two stages and two ranks, of lengths that say nothing of their data."""
    return save_planned(tmp_path / "plan")


def save_planned(directory, *contexts):
    """The same with two levels of packs, where context sizes of these are given."""
    caps = [Caps.of(tiles=8, tokens=30), Caps.of(tiles=8, tokens=120)]
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 5, 60).astype(np.int32)
    text = rng.integers(4, 30, 60).astype(np.int32)
    tokens = tiles * MODEL.vision.tokens_per_item + text
    lengths = lengths_of(tiles=tiles, tokens=tokens, loss_tokens=text // 2)
    cluster = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": 4})
    sizes = Parallel(pipeline=2, data=2)
    job = JobSpec(model=MODEL, cluster=cluster, parallel=sizes, precision="fp32")
    data = SampleData(
        lengths=lengths,
        packs_per_step=6,
        levels=tuple(
            Level(caps=each, context=context) for each, context in zip(caps, contexts, strict=False)
        )
        or (Level(caps=caps[-1]),),
    )
    save_plan(make_plan(PlanRequest(job=job, data=data)), directory)
    return directory


def replay(planned, output, stages, steps=2):
    launch = Launch(rank=0, world_size=1, local_rank=0)
    job = load_replay(planned, None, None)
    options = ReplayOptions(steps=steps, repetitions=2)
    replay_stages(job, options, stages, output, launch, open_store(launch))
    return job


def test_a_stopped_replay_goes_on(planned, tmp_path):
    """Prevents: a replay of hours that starts again, or that mixes two settings."""
    output = tmp_path / "replay"
    job = replay(planned, output, [0])
    with pytest.raises(UserError, match="stage 1 is not replayed yet"):
        read_replay(output, job.plan, job.cost, job.workload)
    first = REPLAY_FILES.file_of(output, 0).read_bytes()
    with pytest.raises(UserError, match="another steps"):
        replay(planned, output, [1], steps=1)
    replay(planned, output, [0, 1])
    assert REPLAY_FILES.file_of(output, 0).read_bytes() == first
    summary = read_replay(output, job.plan, job.cost, job.workload)
    assert len(summary.each_step_ms) == 2
    stages = REPLAY_FILES.read(output, len(job.plan.stages))
    rows = np.flatnonzero(np.isin(job.packs.step, summary.info.steps))
    for stage, replayed in enumerate(stages):
        assert np.array_equal(replayed.rows, rows)
        # A step takes at least what its busiest stage computes.
        busy_ms = np.sum(replayed.forward_ms) + np.sum(replayed.backward_ms)
        assert summary.each_step_ms.sum() >= busy_ms / 2 > 0
        predicted = replayed.predicted_gib(job.plan.prediction.stages[stage].memory)
        # Counted costs know little of what kernels on a CPU keep.
        assert replayed.peak_gib == pytest.approx(predicted, rel=0.5)


def test_one_stage_out_of_memory_costs_the_others_nothing(planned, tmp_path, monkeypatch):
    """Prevents: hours of other stages lost with one, or its memory missing in the next."""
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
        replay(planned, output, [0, 1])
    assert [one.stage for one in REPLAY_FILES.read(output, 2)] == [1]
    assert len(built) == 2


def test_random_content_has_the_packs_sizes(planned):
    """Prevents: a replay of other micro-batches than the plan's."""
    job = load_replay(planned, None, None)
    load = random_rows(job.plan, 1, job.packs, job.lengths)
    for row, batch in enumerate(load(np.arange(len(job.packs)))):
        assert (batch.tiles, batch.tokens) == (
            job.packs.column("tiles")[row],
            job.packs.tokens[row],
        )
        assert sum(batch.segment_tokens) == batch.tokens
        assert batch.pixels_TCPP is None
        samples = job.packs.packs[row]
        assert len(batch.labels_L) == job.lengths.loss_tokens[samples].sum()


def test_data_that_is_not_the_plans_is_refused(planned, tmp_path):
    """Prevents: a replay of samples that the plan does not hold."""
    with pytest.raises(UserError, match="go together"):
        load_replay(planned, tmp_path / "meta.json", None)
    with pytest.raises(UserError, match="does not say which data"):
        load_replay(planned, tmp_path / "meta.json", tmp_path / "tokenizer.model")


def test_every_level_recomputes_its_own_layers(tmp_path):
    """Prevents: a replay that recomputes the layers of one level on the packs of all."""
    directory = save_planned(tmp_path / "plan", 1, 1)
    plan = read_plan(directory)
    again = tuple(
        joined(layer for span in stage.units for layer in span.units if layer.layers)
        for stage in plan.stages
    )
    short, long = plan.levels
    levels = (
        short.model_copy(update={"recompute": ((), ())}),
        long.model_copy(update={"recompute": again}),
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
    """Prevents: times of one chunk, or of one part of a backward, in the place of another's."""
    directory = save_planned(tmp_path / "plan")
    plan = read_plan(directory)
    cuts = CUTS[4] if chunks == 2 else (6,)
    schedule = PipelineSchedule(name=name, chunks=chunks)
    changed = {"stages": tuple(stages_of(MODEL, *cuts, language=(0,))), "schedule": schedule}
    write_plan(plan.model_copy(update=changed | {"prediction": None}), directory)
    job = replay(directory, tmp_path / "replay", [0, 1])
    summary = read_replay(tmp_path / "replay", job.plan, job.cost, job.workload)
    recomputing = next(part for part, stage in enumerate(job.plan.stages) if stage.recompute)
    for stage, parts in zip(summary.stages, schedule.parts_of(len(cuts) + 1), strict=True):
        shape = len(stage.rows), chunks
        again_ms, backward_ms = (
            np.reshape(ms, shape) for ms in (stage.recompute_ms, stage.backward_ms)
        )
        for chunk, part in enumerate(parts):
            assert (again_ms[:, chunk] > 0).all() == (part == recomputing)
        assert len(stage.weight_ms) == (0 if name == "interleaved" else len(stage.backward_ms))
        weight_ms = np.reshape(stage.weight_ms or np.zeros(shape), shape)
        assert (backward_ms > weight_ms + again_ms).all() and (np.min(stage.forward_ms) > 0)
    busy_ms = summary.forward_ms + summary.backward_ms
    assert summary.step_ms > busy_ms.max() > 0


def test_times_belong_to_the_chunks_that_took_them(monkeypatch):
    """Prevents: passes of a chunk, or parts of a backward, whose times another has, as they come in
    another order than micro-batches do."""
    monkeypatch.setattr(clock, "moment", time.thread_time)
    monkeypatch.setattr(replay_module, "moment", time.thread_time)
    large, small = random_batch(MODEL, 200, (4000,), 50), random_batch(MODEL, 2, (40,), 5)
    # This stage holds four vision layers, and then a projector, which costs far less.
    plan = toy_plan(MODEL, stages_of(MODEL, 1, 5, 6))
    plan = with_chunks(plan, 2, "zb-v")
    with standing_in(plan.parallel, 1) as links:
        replayer = StageReplayer(plan, links)
        replayer.step([small, large])
        for place in (0, 3):
            batches = [large if place == i else small for i in range(4)]
            steps = [replayer.step(batches) for _ in range(3)]
            for name in ("forward_ms", "backward_ms", "weight_ms"):
                least_ms = np.min([getattr(one, name) for one in steps], axis=0).reshape(4, 2)
                assert least_ms[:, 0].argmax() == place
                assert least_ms[place, 0] > least_ms[place, 1]


def test_plans_with_shared_packs_are_refused(tmp_path):
    """Prevents: a rank alone that waits for the others of its pack, or that computes it whole."""
    directory = save_planned(tmp_path / "plan", 1, 2)
    with pytest.raises(UserError, match="packs that several ranks share"):
        load_replay(directory, None, None)
