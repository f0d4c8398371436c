"""omnibal check: every inconsistency of a plan directory is found and named."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
from plan_cases import ISF, MODEL, example_lengths, example_profile, job_spec, origin_of, request

from omnibal import training_job
from omnibal.base.errors import UserError
from omnibal.cli.simulate_command import simulate
from omnibal.cost.profile import model_sha256
from omnibal.cost.source import CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.check import check_plan, open_plan, training_obstacles
from omnibal.job.plan import Plan, PlannedLevel, read_plan, write_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult, make_plan, predict_plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import load_cluster
from omnibal.model.encoders import TilingConfig
from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage_units import Span, Stage
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.report.plan_tables import stages_table

pytestmark = pytest.mark.quick

Change = Callable[[ScheduledPacks], ScheduledPacks]
OF_LEVELS = job_spec(parallel=Parallel(pipeline=2, data=4))
SHORT, LONG = 300, 700
"""Token caps of the two levels."""


@pytest.fixture(scope="module")
def example() -> PlanResult:
    return make_plan(request())


@pytest.fixture
def directory(tmp_path: Path, example: PlanResult) -> Path:
    save_plan(example, tmp_path / "plan")
    return tmp_path / "plan"


def long_and_short(count: int = 240) -> Lengths:
    """Return the example's samples; every twelfth has `SHORT` more tokens and needs a long pack."""
    lengths = example_lengths(count=count)
    extra = np.where(np.arange(count) % 12 == 0, SHORT, 0).astype(np.int32)
    return replace(lengths, tokens=lengths.tokens + extra)


def plan_with_levels(packs=None, packs_per_step: int = 12) -> PlanResult:
    """Return a plan of packs for CP 1 and CP 2. CP 2 recomputes a layer."""
    stages = stages_from_cuts(OF_LEVELS.model, (4,))
    long = {"context": 2, "cut": CutRule.ZIGZAG, "recompute": ((), stages[1].units[-2].units[:1])}
    levels = (
        PlannedLevel(caps=Caps.of(tiles=8, tokens=SHORT), recompute=((), ())),
        PlannedLevel(caps=Caps.of(tiles=16, tokens=LONG), **long),
    )
    data = SampleData(
        settings=ISF,
        lengths=long_and_short(240 if packs is None else len(packs.packs.samples)),
        levels=tuple(Level(caps=one.caps, context=one.context, cut=one.cut) for one in levels),
        packs_per_step=packs_per_step,
    )
    packs = data.schedule(OF_LEVELS)[0] if packs is None else packs
    plan = Plan(
        model=OF_LEVELS.model,
        precision=OF_LEVELS.precision,
        parallel=OF_LEVELS.parallel,
        stages=stages,
        levels=levels,
        cluster=OF_LEVELS.cluster,
        data=data.describe(packs, OF_LEVELS),
    )
    workload = OF_LEVELS.workload(packs, data.lengths, plan.levels)
    prediction = predict_plan(plan, OF_LEVELS, packs, workload)
    plan = plan.model_copy(update={"prediction": prediction})
    return PlanResult(plan=plan, data=(packs, data.lengths), search=None)


@pytest.fixture(scope="module")
def levels_result() -> PlanResult:
    return plan_with_levels()


@pytest.fixture
def shared(tmp_path: Path, levels_result: PlanResult) -> Path:
    """Return the directory of a plan with context-parallel packs."""
    save_plan(levels_result, tmp_path / "plan")
    return tmp_path / "plan"


def assert_refused(directory: Path, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def rewrite_plan(directory: Path, **changes: object) -> Plan:
    edited_plan = read_plan(directory).model_copy(update=changes)
    write_plan(edited_plan, directory)
    return edited_plan


def rewrite_data(directory: Path, **changes: object) -> None:
    rewrite_plan(directory, data=read_plan(directory).data.model_copy(update=changes))


def rewrite_packs(directory: Path, change: Change) -> None:
    """Write changed packs, and update their hash and counts in the plan."""
    packs = change(read_packs(directory / "packs.parquet"))
    write_packs(packs, directory / "packs.parquet")
    rewrite_data(directory, packs_sha256=packs.sha256, packs=len(packs), steps=packs.steps)


def edit(directory: Path, **changes: object) -> None:
    """Write values into plan.json, by keys such as `levels[1].caps`."""
    path = directory / "plan.json"
    plan = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, name = (int(part) if part.isdigit() else part for part in re.findall(r"\w+", key))
        reduce(getitem, outer, plan)[name] = value
    path.write_text(json.dumps(plan))


def test_good_plans_pass(tmp_path, example, levels_result):
    """Prevents checks that refuse valid plans, and a fixture without context-parallel packs."""
    of_origin = make_plan(request(lengths=example_lengths(origin_of(MODEL))))
    for number, result in enumerate((example, of_origin)):
        save_plan(result, tmp_path / f"{number}")
        assert len(check_plan(tmp_path / f"{number}")) == 14
    packs, _ = levels_result.data
    assert 0 < packs.level.sum() < len(packs)
    assert levels_result.plan.prediction.lost.context_exchange_ms > 0
    save_plan(levels_result, tmp_path / "levels")
    passed = check_plan(tmp_path / "levels")
    assert "packs have 2 levels of context size 1, 2" in passed
    assert "no pack exceeds the caps of its level" in passed


def with_entry(name: str, row: int, value: int) -> Change:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        column = (packs.column(name) if name == "tiles" else getattr(packs, name)).copy()
        column[row] = value
        return replace(packs, **({"items": {name: column}} if name == "tiles" else {name: column}))

    return change


def with_sample(position: int, sample: int) -> Change:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        samples = packs.packs.samples.copy()
        samples[position] = sample
        return replace(packs, packs=Packs(samples=samples, offsets=packs.packs.offsets))

    return change


def without_row(row: int) -> Change:
    return lambda packs: packs.take(np.delete(np.arange(len(packs)), row))


def swap_rows(row: int, other: int) -> Change:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        order = np.arange(len(packs))
        order[[row, other]] = order[[other, row]]
        return packs.take(order)

    return change


def later_steps(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, step=packs.step + (packs.step >= 2))


def backward_epochs(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, epoch=1 - packs.epoch)


def repeat_sample(packs: ScheduledPacks) -> ScheduledPacks:
    return with_sample(1, int(packs.packs.samples[0]))(packs)


def late_pack(packs: ScheduledPacks) -> ScheduledPacks:
    """Move a full pack to the end of a rank's short last step, a slot too far."""
    last = np.flatnonzero(packs.slot == 0)[-1]
    return replace(packs, slot=packs.slot + (np.arange(len(packs)) >= last).astype(np.int32))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_row(5), "epoch 0 leaves out"),
        (repeat_sample, "leaves out 1 of 300 samples, repeats 1"),
        (with_sample(0, 10_000), "names 1 that do not exist"),
        (with_sample(0, -1), "names 1 that do not exist"),
        (with_entry("tiles", 3, 7), "row 3 has other tiles"),
        (with_entry("tokens", 3, 7), "row 3 has other tokens"),
        (with_entry("dp_rank", 0, 2), "row 0 has no such dp_rank.*0 to 1"),
        (with_entry("dp_rank", 0, -1), "row 0 has no such dp_rank"),
        (with_entry("slot", 3, 6), "row 3 has no such slot.*0 to 5"),
        (swap_rows(0, 1), "row 1 is out of order"),
        (swap_rows(3, 4), "is out of order"),
        (with_entry("slot", 3, 2), "row 3 is out of order"),
        (late_pack, "leaves out a slot"),
        (later_steps, "leaves out a step"),
        (backward_epochs, "is of another epoch"),
    ],
)
def test_wrong_packs_are_refused(directory, change, expected):
    """Prevents training on packs that lose, repeat or misplace samples."""
    rewrite_packs(directory, change)
    assert_refused(directory, expected)


def test_step_of_two_epochs_is_refused(tmp_path):
    """Prevents an epoch border inside a step, which a resumed run could not find."""
    two_epochs_of_a_step = request(
        lengths=example_lengths(count=3), packs_per_step=8, parallel=Parallel(pipeline=1)
    )
    save_plan(make_plan(two_epochs_of_a_step), tmp_path / "plan")
    rewrite_packs(
        tmp_path / "plan",
        lambda p: replace(p, step=p.step * 0, slot=np.arange(len(p), dtype=np.int32)),
    )
    assert_refused(tmp_path / "plan", "is of another epoch")


def first_row(packs: ScheduledPacks, level: int) -> int:
    return int(np.flatnonzero(packs.level == level)[0])


def other_level(packs: ScheduledPacks) -> ScheduledPacks:
    return with_entry("level", first_row(packs, 0), 2)(packs)


def swap_long_pack(packs: ScheduledPacks) -> ScheduledPacks:
    """Swap the samples of a long pack and a short one."""
    moved = swap_rows(first_row(packs, 0), int(packs.tokens.argmax()))(packs)
    return replace(
        packs, packs=moved.packs, tokens=moved.tokens, items=moved.items, epoch=packs.epoch
    )


def shift_rank(packs: ScheduledPacks) -> ScheduledPacks:
    row = first_row(packs, 1)
    moved = with_entry("dp_rank", row, int(packs.dp_rank[row]) + 1)(packs)
    return moved.take(np.lexsort((moved.slot, moved.dp_rank, moved.step)))


def share_own_pack(packs: ScheduledPacks) -> ScheduledPacks:
    """Make a rank's own pack context-parallel. All fit the larger caps."""
    own = np.flatnonzero((packs.level == 0) & (packs.dp_rank == 2))
    return with_entry("level", own[0], 1)(packs)


def later_slot(packs: ScheduledPacks) -> ScheduledPacks:
    """Shift the context-parallel packs of a step's last such slot, leaving a gap."""
    shared = first_row(packs, 1)
    after = (packs.step == packs.step[shared]) & (packs.slot >= packs.slot[shared])
    return replace(packs, slot=packs.slot + after.astype(np.int32))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_level, "has no such level.*levels go from 0 to 1"),
        (swap_long_pack, "exceeds a cap.*the caps of its level"),
        (shift_rank, "begin a context-parallel group.*multiple of its level's context"),
        (share_own_pack, "another context size than a pack of the same step and slot"),
        (later_slot, "leaves out a slot.*count from 0 in each step"),
    ],
)
def test_wrong_shared_packs_are_refused(shared, change, expected):
    """Prevents deadlocks between ranks, and out-of-memory."""
    rewrite_packs(shared, change)
    assert_refused(shared, expected)


@pytest.mark.parametrize("missing", [None, 1])
def test_a_gap_on_a_rank_that_only_shares_is_found(tmp_path, missing):
    """Prevents slot gaps on a rank without pack rows: the second of a context-parallel group."""
    chosen = [index for index in range(25) if index % 12] + [0, 12, 24]
    short, long = chosen[:22], chosen[22:]
    ranks = [rank for rank in range(4) if rank != missing]
    # Slot 0 has a pack per rank, slot 1 a shared pack per group, slot 2 only the first group's.
    lists = [short[rank::4] if rank in ranks else [] for rank in range(4)]
    lists[ranks[-1]] += short[missing::4] if missing is not None else []
    rows = [(rank, 0, 0, lists[rank]) for rank in ranks]
    rows += [(0, 1, 1, long[:1]), (2, 1, 1, long[1:2]), (0, 2, 1, long[2:])]
    rows = sorted(rows)
    dp_rank, slot, level = np.array([row[:3] for row in rows], np.int32).T
    packs = Packs.from_lists([row[3] for row in rows])
    given = packs, long_and_short(25), 0 * slot, dp_rank, slot
    example = plan_with_levels(ScheduledPacks.from_packs(*given, level=level), len(ranks) + 6)
    roomy = tuple(
        level.model_copy(update={"caps": Caps.of(tiles=100, tokens=tokens)})
        for level, tokens in zip(example.plan.levels, (4_000, 5_000), strict=True)
    )
    save_plan(example, tmp_path / "plan")
    data = example.plan.data.model_copy(update={"caps": roomy[1].caps})
    rewrite_plan(tmp_path / "plan", levels=roomy, data=data, prediction=None)
    if missing is None:
        check_plan(tmp_path / "plan")
    else:
        assert_refused(tmp_path / "plan", "leaves out a slot")


EDITS = [
    ("data.lengths_sha256", "0" * 64, r"lengths\.parquet has the content hash"),
    ("data.packs_sha256", "0" * 64, r"packs\.parquet has the content hash"),
    ("data.samples", 299, "samples is 299, and"),
    ("data.packs", 1, "packs is 1, and"),
    ("data.steps", 1, "steps is 1, and"),
    ("data.epochs", 3, "epochs is 3, and"),
    ("data.caps.max_tokens", 300, "exceeds a cap"),
    ("data.seed", -1, "seed: .*greater than or equal to 0"),
    ("data.seed", 10**25, "seed: "),
    ("data.method", "best", "method: .*'balanced', 'isf', 'next_fit' or 'other'"),
    ("data.packs_per_step", 10**25, "packs_per_step: .*2147483647"),
    ("data.packs_per_step", 7, "micro_batches_per_step is 4, and must be 4|another number of"),
    ("data.packs_per_step", 2**31 - 1, "micro_batches_per_step is 4, and must be 1073741824"),
    ("data.micro_batches_per_step", 5, "micro_batches_per_step is 5, and must be 4"),
    ("data.steps_sha256", "0" * 64, "steps_sha256 is 000000000000, and the packs' steps have"),
    ("data", None, "neither data nor shapes, so no steps"),
    ("parallel.pipeline", 3, "2 entries in stages for pipeline size 3, which needs 3"),
    ("parallel.sharded", 3, "parallel: sharded 3, .* must divide data 2"),
    ("cluster.memory_gib", 1e-3, "is predicted to need"),
    ("frozen", ["vision", "vision"], "each part at most once and leave a part to train"),
    ("frozen", ["vision", "projector", "language"], "at most once and leave a part to train"),
    ("prediction.stages", [], r"0 entries for 2 stages.*remove `prediction`"),
    ("schema_version", 4, r"plan\.json"),
]
"""Key of plan.json, changed value, and the expected error."""


@pytest.mark.parametrize(("key", "value", "expected"), EDITS, ids=str)
def test_edited_plans_are_refused(directory, key, value, expected):
    """Prevents a traceback, a launch that fails or runs out of memory, and a run of other steps."""
    edit(directory, **{key: value})
    assert_refused(directory, expected)


EXPERTS = {"layers": 1, "experts": {"experts": 4, "experts_per_token": 2, "ffn_hidden_size": 64}}
OF_ANOTHER = "the stored prediction is of another plan"
HEADS = {"levels[1].exchange": "heads", "levels[1].context": 4}
LOCKSTEP = {"model.language.runs": [EXPERTS], "parallel.expert": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"levels[1].context": 3}, "context 3 must be a power of two"),
        ({"levels[1].context": 8}, "context is 8, and must divide the 4 data-parallel ranks"),
        ({"levels[1].context": True}, "context"),
        ({"levels[1].context": 2.0}, "context"),
        (HEADS, r"levels\[1\]: context size 4 with exchange of heads must divide"),
        (
            {"levels[1].recompute": [["language 0"], []]},
            r"levels\[1\]: stage 0 recomputes language 0 but holds",
        ),
        ({"levels[0].recompute": [[]]}, "recompute has 1 entries for 2 stages"),
        ({"levels[0].caps.max_tokens": 999}, "in the order of rising max_tokens"),
        ({"levels[0].caps": {"max_tokens": SHORT}}, "levels must limit the same features"),
        (LOCKSTEP, "different layers with .*--ep 2, and its 2 lockstep ranks"),
        (
            {"stages[1].recompute": ["language 0"]},
            "stage names layers to recompute, and the plan has `levels`",
        ),
        ({"levels": []}, "has no such level.*levels go from 0 to 0"),
        ({"data.curriculum_steps": 10_000}, "may be no more than the plan's"),
        ({"levels[1].recompute": [[], []]}, OF_ANOTHER),
        ({"levels[1].cut": "contiguous"}, OF_ANOTHER),
    ],
    ids=str,
)
def test_wrong_levels_are_refused(shared, changes, expected):
    """Prevents levels no run can follow, and a prediction made for other levels."""
    edit(shared, **changes)
    assert_refused(shared, expected)


def test_steps_count_a_shared_pack_for_each_of_its_ranks(tmp_path):
    """Prevents plans with context-parallel packs reported as having unequal steps."""
    example = plan_with_levels(packs_per_step=8)
    packs, _ = example.data
    assert len(set(np.bincount(packs.step).tolist())) > 2  # steps of any plan may differ by 1
    save_plan(example, tmp_path / "plan")
    assert any(line.startswith("steps are of 8 packs") for line in check_plan(tmp_path / "plan"))


def test_simulation_and_report_are_of_the_levels(shared, levels_result, capsys):
    """Prevents figures that count a shared pack as one rank's, and hidden recomputation."""
    simulate(shared, as_json=True)
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_ms_mean"] == pytest.approx(levels_result.plan.prediction.step_ms)
    table = stages_table(levels_result.plan)
    at = [column.title for column in table.columns].index("recompute\nby level")
    recomputed = [row[at] for section in table.sections for row in section]
    assert recomputed == ["0 + 0 / 0 + 0", "0 + 0 / 0 + 1"]


def test_model_that_takes_shorter_samples_is_refused(directory):
    """Prevents an edited model trained on samples beyond its maximum RoPE position."""
    most = int(example_lengths().tokens.max())
    for limit in (most, most - 1):
        model = read_plan(directory).model.with_tower("language", max_positions=limit)
        rewrite_plan(directory, model=model, settings_sha256=None)
        if limit == most:
            check_plan(directory)
    assert_refused(directory, f"has {most} tokens, above .* {most - 1}")


@pytest.mark.parametrize("keeps_prediction", [True, False])
def test_removed_recomputation_is_seen(tmp_path, example, keeps_prediction):
    """Prevents out-of-memory after an edit, with a stale prediction or without one."""
    peak_gib = max(stage.memory.peak_gib for stage in example.plan.prediction.stages)
    memory = {"memory_gib": 0.7 * peak_gib / 0.9}
    result = make_plan(request(cluster=example.plan.cluster.model_copy(update=memory)))
    # The plan recomputes, as it does not fit otherwise.
    save_plan(result, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    bare = tuple(stage.model_copy(update={"recompute": ()}) for stage in result.plan.stages)
    changes = {"stages": bare} | ({} if keeps_prediction else {"prediction": None})
    rewrite_plan(tmp_path / "plan", **changes)
    assert_refused(tmp_path / "plan", "is predicted to need")


def recompute_vision(stage: Stage) -> Stage:
    return stage.model_copy(update={"recompute": (Span("vision", stage.layers("vision")),)})


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: {"precision": "bf16"},
        lambda plan: {"parallel": plan.parallel.model_copy(update={"tensor": 2})},
        lambda plan: {
            "model": plan.model.with_tower("language", vocab_size=512),
            "settings_sha256": None,
        },
        lambda plan: {"stages": (recompute_vision(plan.stages[0]), *plan.stages[1:])},
        lambda plan: {"prediction": plan.prediction.model_copy(update={"cost_source": "x"})},
        lambda plan: {"prediction": plan.prediction.model_copy(update={"step_ms": 1.0})},
        lambda plan: {"cluster": plan.cluster.model_copy(update={"link_latency_us": 1e4})},
    ],
)
def test_edited_plan_with_its_old_prediction_is_refused(directory, change):
    """Prevents a report of figures that the edited plan does not have."""
    edited_plan = rewrite_plan(directory, **change(read_plan(directory)))
    assert_refused(directory, r"prediction is of another plan.*remove `prediction`")
    # Training needs no prediction: an older version's must not stop a resumed run.
    assert open_plan(directory, to_train=True).plan == edited_plan
    rewrite_plan(directory, prediction=None)
    assert check_plan(directory)


def other_than(value: object) -> list[object]:
    """Return wrong values for a field of this type, such as a careless edit may write."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, None]
    return [f"{value}x", 1] if isinstance(value, str) else [1, 0.5, "x", True]


def leaves(value: object, place: tuple = ()) -> Iterator[tuple]:
    """Yield paths of all scalars and empty containers of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in inner:
        if isinstance(entry, dict | list) and entry:
            yield from leaves(entry, (*place, key))
        else:
            yield (*place, key)


@pytest.mark.parametrize("has_samples", [True, False])
def test_every_edit_of_model_and_data_is_refused(tmp_path, has_samples):
    """Prevents training with another epsilon, RoPE base or seed than planned."""
    lengths = example_lengths(origin_of(MODEL)) if has_samples else None
    directory = tmp_path / "plan"
    save_plan(make_plan(request(lengths=lengths)), directory)
    path, planned = directory / "plan.json", read_plan(directory)
    written = path.read_text()
    plan = json.loads(written)
    places = [*leaves({"model": plan["model"]}), *leaves({"data": plan["data"] or {}})]
    names = {place[-1] for place in places}
    assert {"norm_eps", "rope_base", "rope_scaling", "layer_scale_init", "vocab_size"} <= names
    assert not has_samples or {"method", "seed"} <= names
    refused = 0
    for *outer, name in places:
        for other in other_than(reduce(getitem, outer, plan)[name]):
            edited_plan = json.loads(written)
            reduce(getitem, outer, edited_plan)[name] = other
            path.write_text(json.dumps(edited_plan))
            try:
                if read_plan(directory) == planned:
                    continue  # equal: a default left out, or another spelling
            except UserError:
                continue  # no plan at all
            assert_refused(directory, ".")
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("data", [True, False])
def test_any_edited_figure_of_a_prediction_is_refused(tmp_path, example, data):
    """Prevents an edited figure that no model predicted in a report."""
    save_plan(example if data else make_plan(request(lengths=None)), tmp_path / "plan")
    path = tmp_path / "plan" / "plan.json"
    text = path.read_text()
    predicted = json.loads(text)["prediction"]
    places = [
        place for place in leaves(predicted) if isinstance(reduce(getitem, place, predicted), float)
    ]
    assert len(places) == (30 if data else 28)

    def edited_plan(factor: float, places: list[tuple]) -> str:
        plan = json.loads(text)
        step_ms = plan["prediction"]["step_ms"]
        for *parents, last in places:
            inner = reduce(getitem, parents, plan["prediction"])
            inner[last] = inner[last] * factor or (factor - 1) * step_ms
        return json.dumps(plan)

    path.write_text(edited_plan(1 + 1e-9, places))  # rounding of another machine
    assert check_plan(tmp_path / "plan")
    for place in places:
        path.write_text(edited_plan(1.001, [place]))
        with pytest.raises(UserError, match="prediction") as raised:
            check_plan(tmp_path / "plan")
        assert str(place[-1]) in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        ({"tensor": 3}, {}, r"tensor size 3 does not divide vision.ffn_hidden_size = 128.*1, 2, 4"),
        ({"tensor": 8}, {}, r"size 8 does not divide language.heads = \d.* allows 1, 2, 4: "),
        ({"tensor": 2}, {"gpus_per_node": 1}, "tensor size 2 is more than the 1 devices"),
        ({"pipeline": 9}, {}, "pipeline size 9 is more than the 8 layers"),
    ],
)
def test_impossible_parallel_sizes_are_refused(directory, example, sizes, changes, expected):
    """Prevents a launch on thousands of devices with sizes that do not divide the tensors."""
    cluster = example.plan.cluster.model_copy(update={"gpus_per_node": 8} | changes)
    parallel = example.plan.parallel.model_copy(update=sizes)
    with pytest.raises(UserError, match=expected):
        make_plan(request(cluster=cluster, parallel=parallel))
    rewrite_plan(directory, parallel=parallel, cluster=cluster)
    assert_refused(directory, expected)


def test_profile_is_kept_with_the_plan(tmp_path, example):
    """Prevents a memory check by other costs than the plan's profile."""
    profile = example_profile(activation_bytes=7_000_000)
    profile = profile.model_copy(update={"model_sha256": model_sha256(MODEL)})
    measured = make_plan(request(cost_source=CostSource(profile)))
    save_plan(measured, tmp_path / "plan")
    assert check_plan(tmp_path / "plan")
    (tmp_path / "plan/profile.json").unlink()
    assert_refused(tmp_path / "plan", "costs from analytic:laptop-cpu")
    for result in (measured, example):
        save_plan(result, tmp_path / "plan")
        assert (tmp_path / "plan/profile.json").exists() == (result is measured)


def test_plan_of_other_data_is_refused(tmp_path):
    """Prevents training on other data or tiling than the lengths'."""
    directory = tmp_path / "plan"
    save_plan(make_plan(request(lengths=example_lengths(origin_of(MODEL)))), directory)
    model = read_plan(directory).model
    for origin in (None, origin_of(MODEL, data_sha256="other")):
        rewrite_data(directory, origin=origin)
        assert_refused(directory, "data.origin of plan.json and of lengths.parquet differ")
    for changes, expected in (
        ({"tiling": TilingConfig(max_dynamic_patch=3)}, "scanned with another tiling, or"),
        ({"image_size": 64}, "scanned with tiles of 32 pixels and 16 tokens"),
    ):
        rewrite_data(directory, origin=origin_of(MODEL))
        rewrite_plan(directory, model=model.with_tower("vision", **changes))
        assert_refused(directory, expected)


@pytest.mark.parametrize(
    ("changes", "expected"), [({"lengths": None}, "shapes only"), ({}, "do not name their data")]
)
def test_what_cannot_be_trained_is_said(tmp_path, changes, expected):
    """Prevents queueing for an untrainable plan, and shapes that pass with too little memory."""
    result = make_plan(request(**changes))
    save_plan(result, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    assert expected in training_obstacles(result.plan)[-1]
    edit(tmp_path / "plan", **{"cluster.memory_gib": 1e-3})
    assert_refused(tmp_path / "plan", "is predicted to need")


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        (
            {"sharded": 2, "pipeline": 1},
            {"precision": "fp8"},
            'parallel.sharded is 2 of parallel.data 2, .* with precision "fp8"',
        ),
        ({}, {"made_for": TargetName.XTUNER}, r"sharded is 1 of .* XTuner v1, .* are full \(2\)"),
        (
            {"sharded": 2},
            {"made_for": TargetName.MEGATRON_LM},
            r"Megatron-LM, which made_for names, are replicated \(1\): set parallel.sharded so",
        ),
        (
            {"sharded": 2},
            {"schedule": PipelineSchedule(name="zb-h1")},
            "schedule zb-h1 splits backwards, but sharded weights reduce",
        ),
        (
            {},
            {
                "schedule": PipelineSchedule(name="zb-h1"),
                "precision": "fp8",
                "cluster": load_cluster("h100-80g"),
            },
            "schedule zb-h1 splits backwards, but FP8 products compute",
        ),
    ],
)
@pytest.mark.parametrize("to_train", [False, True])
def test_an_edited_way_to_hold_weights_is_refused_by_its_keys(
    directory, sizes, changes, expected, to_train
):
    """Prevents a message that names command-line options after an edit of plan.json."""
    parallel = read_plan(directory).parallel.model_copy(update=sizes)
    rewrite_plan(directory, parallel=parallel, **changes)
    with pytest.raises(UserError, match=expected) as error:
        open_plan(directory, to_train=to_train)
    assert "--" not in str(error.value) and "\n" not in str(error.value)


def test_adapters_are_not_planned_beyond_the_key_value_heads():
    """Prevents a search that ends with adapters the trainer refuses."""
    adapters, four = AdapterConfig(rank=2, alpha=4), Parallel(tensor=4, pipeline=1)
    job = job_spec(cluster=load_cluster("h100-80g"), adapters=adapters)
    assert not job.allows(four)
    with pytest.raises(UserError, match=r"tensor size .* exceeds the 2 key-value heads"):
        job.with_sizes(four)
    assert replace(job, adapters=None).allows(four)


@pytest.mark.parametrize("trainer", ["xtuner", "ms-swift-deepspeed"])
def test_a_job_for_a_trainer_that_always_shards_says_so(trainer):
    """Prevents silently resharding a job for a trainer that always shards."""
    parallel = Parallel(pipeline=1, data=8)
    job = training_job("qwen3-8b", "h100-80g", parallel=parallel, trainer=trainer)
    assert job.parallel.sharded == 8
    with pytest.raises(UserError, match="--sharding replicated was given"):
        job.with_sizes(parallel)


EARLIER = '{"schema_version": 2, "beside": {}}', r"3 \(given: 2\); make the plan again with this"


@pytest.mark.parametrize(("content", "expected"), [("", "JSON"), ("{}", "model"), EARLIER])
def test_foreign_plan_json_is_refused(directory, content, expected):
    """Prevents a traceback for a plan.json of another version or format."""
    (directory / "plan.json").write_text(content)
    assert_refused(directory, r"plan\.json.*" + expected)
