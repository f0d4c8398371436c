"""Replays combined into steps, against the prediction and against steps simulated here."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cost_cases import analytic_cost, random_cost
from packing_cases import scheduled_packs
from plan_cases import request
from replay_cases import replay_info, write_replay

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel, side_by_side
from omnibal.data.lengths import Lengths
from omnibal.job.fake_replay import heaviest_windows
from omnibal.job.plan import Plan, PlannedLevel
from omnibal.job.planner import make_plan
from omnibal.job.replay import REPLAY_FILES, choose_steps, heaviest_rows, read_replay
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.features import pack_features
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.stage_memory import GIB, bytes_of_passes, stage_memories
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick


@dataclass(frozen=True, kw_only=True)
class Job:
    plan: Plan
    cost: CostModel
    data: tuple[ScheduledPacks, Lengths]

    @property
    def features(self) -> np.ndarray:
        names = self.cost.features[: len(self.cost.features) // self.cost.levels]
        return pack_features(self.data[0].packs, self.data[1], names)

    @property
    def workload(self) -> Workload:
        shares = shares_of(self.data[0], self.plan.pack_levels)
        return Workload.build(shares, self.features, self.plan.parallel.data)

    def predict(self) -> Prediction:
        plan = self.plan
        packs, stages_at = self.data[0], plan.stages_at_levels
        return predict(
            self.cost, plan.parallel, stages_at, packs, self.workload,
            schedule=plan.schedule,
        )  # fmt: skip

    def write(self, folder: Path, steps: tuple[int, ...] | None = (0,), **info):
        return write_replay(folder, self.plan, self.cost, self.workload, steps, **info)

    def read_back(self, folder: Path, **changes):
        """Read a replay of the plan with other fields."""
        plan = self.plan.model_copy(update=changes)
        return read_replay(folder, plan, self.cost, self.workload)


def job_of(name: str, cluster: str, parallel: Parallel, **stages) -> Job:
    """Return a job of unequal packs of the example lengths, on two data-parallel ranks."""
    model, hardware = load_model(name), load_cluster(cluster)
    made = make_plan(request())
    changes = {"model": model, "cluster": hardware, "parallel": parallel, "prediction": None}
    plan = made.plan.model_copy(update=changes | {"stages": stages_from_cuts(model, **stages)})
    cost = analytic_cost(model, hardware, parallel, plan.precision)
    return Job(plan=plan, cost=cost, data=made.data)


SCHEDULES = {
    "interleaved": PipelineSchedule(name="interleaved", chunks=2),
    # Depends on the exact number of micro-batches.
    "back_and_forth": PipelineSchedule(name="zb-v", chunks=2),
    "in_two_parts": PipelineSchedule(name="zb-h1"),
}


@cache
def job_named(name: str) -> Job:
    """Return four stages of the digits model, some layers recomputed, or the variant `name`."""
    if name == "two_levels":
        return two_levels(job_named("small"))
    if name == "tensor_parallel":
        # Two stages with 25 vision heads, padded to 26, on two tensor-parallel ranks.
        sizes = Parallel(tensor=2, pipeline=2, data=2, sequence_parallel=True)
        stages = {"cuts": (40,), "recomputed": [(10, 0), (0, 20)]}
        return job_of("internvl-chat-1.5-6b-20b", "a100-80g", sizes, **stages)
    if name in SCHEDULES:
        small, schedule = job_named("small"), SCHEDULES[name]
        sizes = Parallel(pipeline=4 // schedule.chunks, data=2)
        plan = small.plan.model_copy(update={"parallel": sizes, "schedule": schedule})
        return replace(small, plan=plan)
    stages = {"cuts": CUTS, "recomputed": [(1, 0), (3, 0), (0, 1), (0, 0)]}
    return job_of("internvl-digits", "laptop-cpu", Parallel(pipeline=4, data=2), **stages)


@pytest.fixture(scope="module")
def small() -> Job:
    return job_named("small")


CUTS = (2, 5, 8)


def two_levels(small: Job) -> Job:
    """Return the job with larger packs on a costlier level that recomputes all layers."""
    packs, lengths = small.data
    stages, caps = small.plan.stages, small.plan.data.caps
    half = int(np.median(packs.tokens))
    all_layers = [(len(s.layers("vision")), len(s.layers("language"))) for s in stages]
    every = stages_from_cuts(small.plan.model, cuts=CUTS, recomputed=all_layers)
    levels = (
        PlannedLevel(caps=Caps.of(tiles=caps["tiles"], tokens=half), recompute=((),) * len(stages)),
        PlannedLevel(caps=caps, recompute=tuple(stage.recompute for stage in every)),
    )
    bare = tuple(stage.model_copy(update={"recompute": ()}) for stage in stages)
    units = small.cost.units.items()
    longer = {name: replace(unit, forward_ms=2 * unit.forward_ms) for name, unit in units}
    return Job(
        plan=small.plan.model_copy(update={"stages": bare, "levels": levels}),
        cost=side_by_side([small.cost, replace(small.cost, units=longer)]),
        data=(replace(packs, level=(packs.tokens > half).astype(np.int32)), lengths),
    )


@pytest.mark.parametrize("name", ["small", "tensor_parallel", "two_levels", *SCHEDULES])
def test_replay_as_predicted_is_the_prediction(tmp_path: Path, name: str) -> None:
    """Prevents a replay that adds time to its measurements."""
    job = job_named(name)
    job.write(tmp_path, None)
    replay, predicted = job.read_back(tmp_path), job.predict()
    assert replay.step_ms == pytest.approx(predicted.step_ms)
    assert replay.predicted_step_ms == pytest.approx(predicted.step_ms)
    assert replay.idle_fraction == pytest.approx(predicted.bubble_fraction)
    assert replay.lost.model_dump() == pytest.approx(predicted.lost.model_dump(), abs=1e-9)
    assert sum(replay.lost.model_dump().values()) == pytest.approx(replay.step_ms)
    packs = job.data[0]
    per_step = len(packs) / (packs.steps * job.plan.parallel.data)
    for stage, expected in enumerate(predicted.stages):
        assert replay.wait_fractions[stage] == pytest.approx(expected.wait_fraction)
        assert replay.forward_ms[stage] == pytest.approx(expected.forward_ms * per_step)
        assert replay.backward_ms[stage] == pytest.approx(expected.backward_ms * per_step)
    assert 0 < replay.recompute_fraction < 0.5
    if name == "tensor_parallel":
        assert replay.lost.padding_ms > 0 < replay.lost.communication_ms


@pytest.mark.parametrize("name", ["small", *SCHEDULES])
def test_slower_stage_is_in_every_pass(tmp_path: Path, name: str) -> None:
    """Prevents a measured time used for another chunk, or another part of a backward."""
    job = job_named(name)
    plan, size = job.plan, job.plan.parallel.pipeline
    factors = (1.0, 2.0, *[1.0] * (size - 2))
    job.write(tmp_path, (0, 3), factors=factors)
    replay = job.read_back(tmp_path)
    rows = np.isin(job.workload.step, (0, 3))
    times = workload_times(job.cost, [plan.stages], job.workload.rows(rows))
    of_parts = np.array(factors)[[plan.schedule.placement.stage_of(k, size) for k in range(4)]]
    passes = ("forward_ms", "backward_ms", "weight_ms", "recompute_ms")
    slower = replace(times, **{name: getattr(times, name) * of_parts for name in passes})
    once = per_step_costs(job.cost, plan.stages, plan.schedule)
    expected = predict_steps(slower, job.workload.rows(rows), once, plan.schedule)
    assert replay.each_step_ms == pytest.approx(expected.step_ms)
    assert (replay.each_step_ms > replay.predicted_each_step_ms).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_heaviest_windows_are_steps_that_need_as_much(name: str) -> None:
    """Prevents windows that peak within their step, and need less by themselves."""
    job = job_named(name)
    plan, workload = job.plan, job.workload
    # Links and shared buffers are sized by the run's largest micro-batch.
    names = "output_bytes", "output_gradient_bytes", "shared_bytes"
    nothing = dict.fromkeys(names, np.zeros(len(job.cost.features)))
    units = {name: replace(unit, **nothing) for name, unit in job.cost.units.items()}
    cost = replace(job.cost, units=units)
    memories = stage_memories(cost, plan.stages_at_levels, workload, plan.schedule)

    def max_gib(rows: Workload, stage: int) -> float:
        arguments = cost, plan.stages_at_levels, rows, plan.schedule, stage, rows.features
        return bytes_of_passes(*arguments).needed.max() / GIB

    sizes = set()
    for stage, memory in enumerate(memories):
        windows = heaviest_windows(cost, plan, stage, workload)
        assert max_gib(workload, stage) == pytest.approx(memory.passes_gib)
        assert windows[0][1] == pytest.approx(memory.passes_gib)
        heaviest = map(workload.rows, heaviest_rows(cost, plan, stage, workload))
        assert max(max_gib(own, stage) for own in heaviest) == pytest.approx(memory.passes_gib)
        for chosen, predicted_gib in windows:
            rows = workload.rows(chosen)
            assert (np.diff(chosen) == 1).all() and len({*rows.step}) == 1
            alone = replace(rows, slot=np.arange(len(rows)))
            assert max_gib(alone, stage) >= predicted_gib * (1 - 1e-9)
            sizes.add(len(rows))
    assert min(sizes) <= workload.slot.max(), "none is a part of a step"


def test_peak_stands_beside_what_was_measured_of_it(small: Job, tmp_path: Path) -> None:
    """Prevents comparing working memory that was not measured, or omitting it if measured."""
    stages = small.predict().stages
    for counted in (True, False):
        replays = small.write(tmp_path / f"{counted}", with_working_memory=counted)
        for replay, stage in zip(replays, stages, strict=True):
            memory = stage.memory
            kept = memory.weights_gib + memory.gradients_gib + memory.optimizer_gib
            kept += memory.activations_gib + (memory.transient_gib if counted else 0)
            assert replay.predicted_gib(memory) == pytest.approx(kept)
            assert replay.peak_gib == pytest.approx(0.5 + replay.stage + 1)


def test_replay_of_another_plan_is_refused(small: Job, tmp_path: Path) -> None:
    """Prevents times of other stages or packs compared with this plan's prediction."""
    small.write(tmp_path)
    small.read_back(tmp_path, prediction=small.predict())
    fewer = tuple(s.model_copy(update={"recompute": ()}) for s in small.plan.stages)
    with pytest.raises(UserError, match="is the replay of another plan"):
        small.read_back(tmp_path, stages=fewer)


def test_unfinished_replay_is_refused(small: Job, tmp_path: Path) -> None:
    """Prevents a step without the stages that are not replayed yet."""
    with pytest.raises(UserError, match=r"replay\.json: no such file"):
        small.read_back(tmp_path)
    small.write(tmp_path)
    for stage in (1, 2):
        (tmp_path / f"stage_{stage}.json").unlink()
    assert [kept.stage for kept in REPLAY_FILES.read_stages(tmp_path, 4)] == [0, 3]
    with pytest.raises(UserError, match=r"stage 1 is not replayed yet \(2 of 4 are missing\)"):
        small.read_back(tmp_path)


def test_replay_goes_on_only_as_it_began(small: Job, tmp_path: Path) -> None:
    """Prevents combining stages of other steps, content or devices into one step."""
    info = replay_info(small.plan, (0, 1))
    REPLAY_FILES.open(tmp_path / "replay", info)
    REPLAY_FILES.open(tmp_path / "replay", info)
    others = {"steps": (0, 2), "content": "data", "device": "another", "provider": "te"}
    for name, value in others.items():
        other = replay_info(small.plan, **({"steps": (0, 1)} | {name: value}))
        with pytest.raises(UserError, match=f"holds a replay with another {name}"):
            REPLAY_FILES.open(tmp_path / "replay", other)


def test_stage_of_other_packs_is_refused(small: Job, tmp_path: Path) -> None:
    """Prevents one micro-batch's times used for another, and lists of unequal lengths."""
    replays = small.write(tmp_path)
    rows = tuple(row + 1 for row in replays[2].rows)
    for changed, other, message in (
        (replays[2:3], rows, "stage 2 has other packs than its steps"),
        (replays[2:3], rows[:-1], "differ in length"),
        (replays, rows, "stage 0 has other packs than its steps"),
    ):
        for replay in changed:
            REPLAY_FILES.write(replay.model_copy(update={"rows": other}), tmp_path)
        with pytest.raises(UserError, match=message):
            small.read_back(tmp_path)


@pytest.mark.parametrize(
    ("samples_of_packs", "odd"),
    [
        pytest.param([[1, 2], [2, 2], [3], [1, 1], [2, 1]], 2, id="balanced"),
        pytest.param([[4, 4], [5, 3], [6, 1, 1], [8], [2, 2]], 4, id="as-many-samples"),
    ],
)
def test_a_step_with_what_is_left_over_is_not_chosen(samples_of_packs, odd):
    """Prevents replaying an unusual step of leftover samples."""
    sizes = np.concatenate(samples_of_packs)
    packs = Packs.from_lists(np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1]))
    step = np.repeat(np.arange(5), list(map(len, samples_of_packs)))
    others = tuple(number for number in range(5) if number != odd)
    assert choose_steps(scheduled_packs(packs, step), 10) == others


def test_steps_are_spread_over_the_run(small: Job) -> None:
    """Prevents replaying only a run's beginning, a step twice, or some ranks' packs."""
    packs = small.data[0]
    every = choose_steps(packs, 10**6)
    epochs = int(packs.epoch[-1]) + 1  # each has a step of leftover packs
    assert len(every) >= packs.steps - epochs and list(every) == sorted(set(every))
    few = choose_steps(packs, 3)
    parts = np.array_split(np.array(every), 3)
    assert all(part[0] < step < part[-1] for part, step in zip(parts, few, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_heaviest_rows_are_where_the_prediction_peaks(small: Job, seed: int) -> None:
    """Prevents measuring the peak of lighter micro-batches than predicted."""
    packs, stages = small.data[0], small.plan.stages
    cost, features = random_cost(np.random.default_rng(seed)), small.features
    if seed == 0:
        # Inputs, which stage 1 keeps alone, grow with tokens, other memory with squared lengths.
        inputs, inner = 1e4 * np.eye(5)[2], 1e6 * np.eye(5)[3]
        kept = {"boundary_bytes": inputs, "activation_bytes": inputs + inner}
        cost = replace(cost, units={kind: replace(u, **kept) for kind, u in cost.units.items()})
    memories = stage_memories(cost, [stages], replace(small.workload, features=features))

    units = cost.units.values()
    whole, boundary = (
        np.array([getattr(unit, name) for unit in units])
        for name in ("activation_bytes", "boundary_bytes")
    )
    for index, stage in enumerate(stages):
        held, again = unit_counts(cost.kinds, stage.units), unit_counts(cost.kinds, stage.recompute)
        kept = (held - again) @ whole + again @ boundary
        peaks = {}
        for step in range(packs.steps):
            for rank in range(2):
                own = np.flatnonzero((packs.step == step) & (packs.dp_rank == rank))
                sizes, most = features[own] @ kept, len(stages) - index
                windows = [sizes[max(0, end - most) : end].sum() for end in range(1, len(own) + 1)]
                peaks[tuple(own)] = max(windows)
        chosen = [tuple(rows) for rows in heaviest_rows(cost, small.plan, index, small.workload)]
        heaviest = max(peaks[rows] for rows in chosen)
        assert heaviest == pytest.approx(max(peaks.values())) and heaviest > min(peaks.values())
        assert heaviest / GIB == pytest.approx(memories[index].activations_gib)
        arguments = cost, [stages], small.workload, ONE_FORWARD_ONE_BACKWARD, index, features
        in_passes = bytes_of_passes(*arguments).needed.reshape(2, -1)
        needed = in_passes[:, [row for rows in chosen for row in rows]].max()
        memory = memories[index]
        assert needed / GIB == pytest.approx(memory.activations_gib + memory.transient_gib)
        assert len(set(chosen)) == len(chosen) <= 2


def test_heaviest_packs_are_found_at_their_own_levels(small: Job) -> None:
    """Prevents searching a memory peak as if all packs recomputed equal layers."""
    job = job_named("two_levels")
    plan, cost, workload = job.plan, job.cost, job.workload
    lighter = 0
    for stage, memory in enumerate(stage_memories(cost, plan.stages_at_levels, workload)):
        max_gib = memory.activations_gib + memory.transient_gib
        features = workload.features_of(cost)
        arguments = cost, plan.stages_at_levels, workload, plan.schedule, stage, features
        needed = bytes_of_passes(*arguments).needed.reshape(2, -1) / GIB
        chosen = np.concatenate(heaviest_rows(cost, plan, stage, workload))
        assert needed[:, chosen].max() == pytest.approx(max_gib)
        windows = heaviest_windows(cost, plan, stage, workload)
        assert windows[0][1] == pytest.approx(max_gib)
        # The peak if no pack recomputed anything.
        none = plan.model_copy(update={"levels": ()})
        others = np.concatenate(heaviest_rows(small.cost, none, stage, small.workload))
        lighter += needed[:, others].max() < max_gib
    assert lighter, "levels change no peak"
