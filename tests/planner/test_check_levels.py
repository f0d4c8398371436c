"""Check of plans with levels: every way in which shared packs can be wrong is found and named."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from plan_cases import example_lengths, job_spec

from omnibal.base.errors import UserError
from omnibal.cli.simulate import simulate
from omnibal.data.lengths import Lengths
from omnibal.job.check import check_plan
from omnibal.job.plan import Plan, PlannedLevel, read_plan, write_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult, prediction_of
from omnibal.model.levels import CutRule
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.report.plan_tables import stages_table
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import steps_of

pytestmark = pytest.mark.quick

JOB = job_spec(parallel=Parallel(pipeline=2, data=4))
SHORT, LONG = 300, 700
"""Caps of tokens."""


def long_and_short(count: int = 240) -> Lengths:
    """The example's samples, of which every twelfth has so much text that it needs a long pack."""
    lengths = example_lengths(count=count)
    extra = np.where(np.arange(count) % 12 == 0, SHORT, 0).astype(np.int32)
    return replace(lengths, tokens=lengths.tokens + extra)


def planned(packs: ScheduledPacks | None = None, packs_per_step: int = 12) -> PlanResult:
    """A plan of two levels: packs of one rank, and longer ones of two, which recompute a layer."""
    stages = stages_from_cuts(JOB.model, (4,))
    layer = stages[1].units[-2].units[:1]
    levels = (
        PlannedLevel(caps=Caps.of(tiles=8, tokens=SHORT), recompute=((), ())),
        PlannedLevel(
            caps=Caps.of(tiles=16, tokens=LONG),
            context=2,
            cut=CutRule.ZIGZAG,
            recompute=((), layer),
        ),
    )
    data = SampleData(
        settings=PackSettings(packing=PackingMethod.ISF),
        lengths=long_and_short(240 if packs is None else len(packs.packs.samples)),
        levels=tuple(level.unplanned for level in levels),
        packs_per_step=packs_per_step,
    )
    lengths = data.lengths
    packs = data.schedule(JOB)[0] if packs is None else packs
    plan = Plan(
        model=JOB.model,
        precision=JOB.precision,
        parallel=JOB.parallel,
        stages=stages,
        levels=levels,
        cluster=JOB.cluster,
        data=data.described(packs, JOB),
    )
    prediction = prediction_of(plan, JOB, packs, JOB.workload(packs, lengths, plan.levels))
    plan = plan.model_copy(update={"prediction": prediction})
    return PlanResult(plan=plan, data=(packs, lengths), search=None)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return planned()


@pytest.fixture
def directory(tmp_path: Path, result: PlanResult) -> Path:
    save_plan(result, tmp_path / "plan")
    return tmp_path / "plan"


def rewrite_packs(directory: Path, change: Callable[[ScheduledPacks], ScheduledPacks]) -> None:
    """Write changed packs, and their hashes into the plan, as a careless tool would."""
    packs, plan = change(read_packs(directory / "packs.parquet")), read_plan(directory)
    write_packs(packs, directory / "packs.parquet")
    assert plan.data is not None
    hashes = {"packs_sha256": packs.sha256, "steps_sha256": steps_of(packs).sha256}
    update = {"data": plan.data.model_copy(update=hashes), "prediction": None}
    write_plan(plan.model_copy(update=update), directory)


def test_a_good_plan_of_levels_passes(directory: Path, result: PlanResult) -> None:
    """Prevents checks that refuse what the planner makes, and a fixture without shared packs."""
    packs, _ = result.data or pytest.fail("no packs")
    assert 0 < packs.level.sum() < len(packs)
    passed = check_plan(directory)
    assert "packs are of 2 levels of context size 1, 2" in passed
    assert "no pack exceeds the caps of its level" in passed
    assert result.plan.prediction.lost.context_exchange_ms > 0


def first_row(packs: ScheduledPacks, level: int) -> int:
    return int(np.flatnonzero(packs.level == level)[0])


def other_level(packs: ScheduledPacks) -> ScheduledPacks:
    level = packs.level.copy()
    level[first_row(packs, 0)] = 2
    return replace(packs, level=level)


def too_long_for_its_level(packs: ScheduledPacks) -> ScheduledPacks:
    """The samples of a long pack and of a short one trade places."""
    rows = np.arange(len(packs))
    place, filler = first_row(packs, 0), int(packs.tokens.argmax())
    rows[[place, filler]] = rows[[filler, place]]
    moved = packs.take(rows)
    return replace(
        packs, packs=moved.packs, tokens=moved.tokens, items=moved.items, epoch=packs.epoch
    )


def off_its_block(packs: ScheduledPacks) -> ScheduledPacks:
    dp_rank = packs.dp_rank.copy()
    dp_rank[first_row(packs, 1)] += 1
    moved = replace(packs, dp_rank=dp_rank)
    return moved.take(np.lexsort((moved.slot, moved.dp_rank, moved.step)))


def shared_beside_others(packs: ScheduledPacks) -> ScheduledPacks:
    """A rank's own pack becomes one that it shares; all fit the caps of longer packs."""
    level = packs.level.copy()
    level[np.flatnonzero((packs.level == 0) & (packs.dp_rank == 2))[0]] = 1
    return replace(packs, level=level)


def later_slot(packs: ScheduledPacks) -> ScheduledPacks:
    """All shared packs of a step's last shared slot come a slot later, so that one is left out."""
    shared = np.flatnonzero(packs.level == 1)
    step = packs.step[shared[0]]
    in_step = packs.step == step
    after = in_step & (packs.slot >= packs.slot[shared[0]])
    return replace(packs, slot=packs.slot + after.astype(np.int32))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_level, "has no such level.*levels go from 0 to 1"),
        (too_long_for_its_level, "exceeds a cap.*the caps of its level"),
        (off_its_block, "shared by ranks that are no block.*multiple of its level's context"),
        (shared_beside_others, "another context size than a pack of the same step and slot"),
        (later_slot, "leaves out a slot.*count from 0 in each step"),
    ],
)
def test_wrong_shared_packs_are_refused(directory: Path, change, expected: str) -> None:
    """Prevents runs whose ranks wait for each other for ever, or do not fit."""
    rewrite_packs(directory, change)
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


@pytest.mark.parametrize("missing", [None, 1])
def test_a_gap_on_a_rank_that_only_shares_is_found(tmp_path: Path, missing: int | None) -> None:
    """Prevents gaps of ranks that no row of the packs names: the second of a block."""
    lengths = long_and_short(25)
    chosen = [index for index in range(25) if index % 12] + [0, 12, 24]
    short, long = chosen[:22], chosen[22:]
    ranks = [rank for rank in range(4) if rank != missing]
    # Slot 0 is every rank's own, slot 1 shared, slot 2 the first block's.
    lists = [short[rank::4] if rank in ranks else [] for rank in range(4)]
    lists[ranks[-1]] += short[missing::4] if missing is not None else []
    rows = [(rank, 0, 0, lists[rank]) for rank in ranks]
    rows += [(0, 1, 1, long[:1]), (2, 1, 1, long[1:2]), (0, 2, 1, long[2:])]
    rows = sorted(rows)
    dp_rank, slot, level = (
        np.array(column, np.int32) for column in list(zip(*rows, strict=True))[:3]
    )
    packs = Packs.from_lists([row[3] for row in rows])
    scheduled = ScheduledPacks.of(packs, lengths, 0 * slot, dp_rank, slot, level=level)
    made = planned(scheduled, packs_per_step=len(ranks) + 6)
    roomy = tuple(
        level.model_copy(update={"caps": Caps.of(tiles=100, tokens=tokens)})
        for level, tokens in zip(made.plan.levels, (4_000, 5_000), strict=True)
    )
    data = made.plan.data.model_copy(update={"caps": roomy[1].caps})
    plan = made.plan.model_copy(update={"levels": roomy, "data": data, "prediction": None})
    save_plan(replace(made, plan=plan), tmp_path / "plan")
    if missing is None:
        check_plan(tmp_path / "plan")
    else:
        with pytest.raises(UserError, match="leaves out a slot"):
            check_plan(tmp_path / "plan")


EXPERTS = {"layers": 1, "experts": {"experts": 4, "experts_per_token": 2, "ffn_hidden_size": 64}}
OF_ANOTHER = "the stored prediction is of another plan"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"levels[1].context": 3}, "context is 3, and must be a power of two"),
        ({"levels[1].context": 8}, "context is 8, and must divide the 4 data-parallel ranks"),
        ({"levels[1].context": True}, "context"),
        ({"levels[1].context": 2.0}, "context"),
        (
            {"levels[1].exchange": "heads", "levels[1].context": 4},
            r"levels\[1\]: context size 4 with exchange of heads needs",
        ),
        (
            {"levels[1].recompute": [["language 0"], []]},
            r"levels\[1\]: stage 0 recomputes language 0 but holds",
        ),
        ({"levels[0].recompute": [[]]}, "recompute has 1 entries for 2 stages"),
        ({"levels[0].caps.max_tokens": 999}, "levels must come in the order of rising max_tokens"),
        ({"levels[0].caps": {"max_tokens": SHORT}}, "all levels must limit the same features"),
        (
            {"model.language.runs": [EXPERTS], "parallel.expert": 2},
            "different layers with .*--ep 2, whose 2 data-parallel ranks",
        ),
        (
            {"stages[1].recompute": ["language 0"]},
            "a stage names layers to recompute beside `levels`",
        ),
        ({"levels": []}, "has no such level.*levels go from 0 to 0"),
        ({"data.curriculum_steps": 10_000}, "may be no more than the plan's"),
        ({"levels[1].recompute": [[], []]}, OF_ANOTHER),
        ({"levels[1].cut": "contiguous"}, OF_ANOTHER),
    ],
    ids=str,
)
def test_wrong_levels_are_refused(directory: Path, changes: dict, expected: str) -> None:
    """Prevents levels that no run can follow, and predictions made with another level's."""
    path = directory / "plan.json"
    plan = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, name = re.findall(r"\w+", key)
        reduce(lambda inner, k: inner[int(k) if k.isdigit() else k], outer, plan)[name] = value
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_steps_count_a_shared_pack_for_each_of_its_ranks(tmp_path: Path) -> None:
    """Prevents plans of levels whose steps seem to be of many sizes."""
    made = planned(packs_per_step=8)
    packs, _ = made.data or pytest.fail("no packs")
    assert len(set(np.bincount(packs.step).tolist())) > 2  # one may differ in any plan
    save_plan(made, tmp_path / "plan")
    assert any(line.startswith("steps are of 8 packs") for line in check_plan(tmp_path / "plan"))


def test_simulation_and_report_are_of_the_levels(
    directory: Path, result: PlanResult, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents figures of a plan's shared packs as if each were one rank's, and hidden layers."""
    simulate(directory, None, None, True)
    simulated = json.loads(capsys.readouterr().out)
    prediction = result.plan.prediction
    assert simulated["step_ms_mean"] == pytest.approx(prediction.step_ms)
    table = stages_table(result.plan)
    (titles,) = [[column.title for column in table.columns]]
    at = titles.index("recompute\nby level")
    assert [row[at] for section in table.sections for row in section] == [
        "0 + 0 / 0 + 0",
        "0 + 0 / 0 + 1",
    ]
