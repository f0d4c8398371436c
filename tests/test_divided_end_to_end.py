"""End-to-end runs with sharded weights, data-parallel encoders and context-parallel packs."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encoder_cases import choice_of
from end_to_end_cases import (
    PLAN,
    assert_same_evaluation,
    losses,
    ranks_succeed,
    records,
    succeed,
    training,
)

from megatron.vlm.run.arguments import parse_arguments
from megatron.vlm.run.launch import RankLaunch
from megatron.vlm.run.pretrain import load_run, open_trainable
from omnibal.base.errors import UserError
from omnibal.job.plan import PlannedLevel, read_plan
from omnibal.job.plan_files import read_plan_data, save_plan
from omnibal.job.planner import PlanResult
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.levels import CutRule
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.unit_runs import stages_from_cuts

SETTINGS = "data_parallel_encoders"  # key of plan.json
ENCODERS = choice_of(2, 4, {"vision": 3}, sharded=2)


def edit_plan(source: Path, name: str, edit: Callable[[dict], None]) -> Path:
    """Copy a plan's folder and edit the copy's plan.json."""
    folder = shutil.copytree(source, source.with_name(name))
    plan = json.loads((folder / "plan.json").read_text())
    edit(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.fixture(scope="module")
def plans(single, tmp_path_factory) -> dict[str, Path]:
    """Plans of identical steps: one rank, sharded weights or encoders, and shared packs."""
    base = tmp_path_factory.mktemp("plans")

    def make_plan(name: str, *sizes: str) -> Path:
        succeed(*PLAN, "--steps-of", single, *sizes, "-o", base / name)
        return base / name

    def shard_weights(plan: dict) -> None:
        plan["parallel"]["sharded"] = 2
        plan["prediction"] = None

    wide, pairs = make_plan("wide", "--dp", "4"), make_plan("pairs", "--pp", "2", "--dp", "2")
    apart = make_plan("data-parallel", "--pp", "2", "--dp", "2", "--encoder", "data-parallel")
    return {
        "single": single,
        "sharded": edit_plan(wide, "sharded", shard_weights),
        "staged": edit_plan(pairs, "staged", shard_weights),
        "data-parallel": apart,
        "divided": edit_plan(apart, "divided", lambda plan: plan[SETTINGS].update(sharded=4)),
        "pair": shared_plan(single, base / "pair", 2, (1, 2)),
        "four": shared_plan(single, base / "four", 4, (2, 4), ENCODERS),
    }


def shared_plan(
    single: Path,
    folder: Path,
    data: int,
    contexts: tuple[int, int],
    dp_encoders: DataParallelEncoders | None = None,
) -> Path:
    """Write a plan of these steps on `data` ranks: CP `contexts[0]` for short packs, else `[1]`."""
    plan = read_plan(single)
    packs, sample_lengths = read_plan_data(plan, single)
    short, caps = int(np.median(packs.tokens)), plan.data.caps
    levels = tuple(
        PlannedLevel(
            caps=Caps.of(tiles=caps["tiles"], tokens=cap),
            context=context,
            cut=CutRule.ZIGZAG,
            recompute=(recompute_units,),
        )
        for context, cap, recompute_units in zip(
            contexts, (short, caps["tokens"]), ((), ("language 0",)), strict=True
        )
    )
    dealt = deal_packs(packs, (packs.tokens > short).astype(np.int32), contexts, data)
    of_data = {
        "method": "other",
        "packs_sha256": dealt.sha256,
        "micro_batches_per_step": -(-plan.data.packs_per_step // data),
    }
    changes = {
        "parallel": Parallel(pipeline=1, data=data),
        "levels": levels,
        "data": plan.data.model_copy(update=of_data),
        "settings_sha256": None,
        "prediction": None,
        SETTINGS: dp_encoders,
    }
    if dp_encoders is not None:
        changes["stages"] = stages_from_cuts(plan.model.without_encoders(), ())
    shared = plan.model_copy(update=changes)
    shared = type(plan).model_validate_json(shared.model_dump_json())
    save_plan(PlanResult(plan=shared, data=(dealt, sample_lengths), search=None), folder)
    return folder


def deal_packs(
    packs: ScheduledPacks, level: np.ndarray, contexts: tuple[int, int], data: int
) -> ScheduledPacks:
    """Deal packs to slots of one context size; widest slots first."""
    place = {"dp_rank": np.zeros(len(packs), np.int32), "slot": np.zeros(len(packs), np.int32)}
    for step in range(packs.steps):
        rows = []
        for level_index, context in enumerate(contexts):
            members = np.flatnonzero((packs.step == step) & (level == level_index))
            size = data // context
            rows += [(members[k : k + size], context) for k in range(0, len(members), size)]
        rows.sort(key=lambda row: -len(row[0]) * row[1])
        for slot, (members, context) in enumerate(rows):
            place["slot"][members] = slot
            place["dp_rank"][members] = np.arange(len(members)) * context
    order = np.lexsort((place["slot"], place["dp_rank"], packs.step))
    moved = packs.take(order)
    columns = {name: column[order] for name, column in place.items()}
    fields = {name: getattr(moved, name) for name in moved.__slots__}
    return ScheduledPacks(**{**fields, **columns, "level": level[order]})


@pytest.fixture(scope="module")
def eval_options(digits) -> tuple[object, ...]:
    """Options for training to step 3 with validation and evaluation."""
    data = ("--eval-data", digits / "heldout" / "meta.json", "--eval-samples", "12")
    return (*data, "--eval-interval", "3", "--max-new-tokens", "2", "--train-iters", "3")


@pytest.fixture(scope="module")
def single_run(single, digits, eval_options, tmp_path_factory) -> Path:
    """A run of three steps on one process."""
    save = tmp_path_factory.mktemp("runs") / "alone"
    succeed(*training(single, digits, save, *eval_options))
    return save


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (("sharded", 4), [("single", 1), ("sharded", 4)]),
        (("single", 1), [("staged", 4)]),
        (("data-parallel", 4), [("single", 1), ("divided", 4), ("data-parallel", 4)]),
        (("pair", 2), [("four", 4)]),
    ],
    ids=["weights", "weights of stages", "encoders", "packs"],
)
def test_ranks_that_divide_train_resume_and_answer_as_one_process(
    plans, single_run, digits, eval_options, tmp_path, first, others
):
    """Prevents losses, answers or sample counts that depend on sharding, or a resume that fails."""
    plan, ranks = first
    begun, saves = tmp_path / "begun", []
    ranks_succeed(ranks, *training(plans[plan], digits, begun, "--train-iters", "2"))
    if plan == "pair":
        checked = succeed("-m", "omnibal", "check", plans[plan])
        assert "levels of context size 1, 2" in checked
    for plan, ranks in others:
        # The last plan resumes in the directory of the first.
        saves.append(begun if (plan, ranks) == others[-1] else tmp_path / plan)
        resume = training(plans[plan], digits, saves[-1], "--load", begun, *eval_options)
        said = ranks_succeed(ranks, *resume)
    assert f"resuming {begun} after step 2" in said
    for save in saves:
        expected = losses(single_run) if save == begun else losses(single_run)[2:]
        assert losses(save) == pytest.approx(expected, rel=1e-4)
    counted = [
        [(record["samples"], record["tokens"], record["tiles"]) for record in records(save)]
        for save in (begun, single_run)
    ]
    assert counted[0] == counted[1]
    assert_same_evaluation([*saves, single_run])
    if plan == "data-parallel":
        assert all(s["encoder_ms"] > 0 for record in records(begun) for s in record["stages"])
        page = tmp_path / "report.html"
        succeed("-m", "omnibal", "report", plans[plan], "--run", begun, "-o", page)
        headings = re.findall("<th[^>]*>([^<]*)</th>", page.read_text())
        assert {"encoders\nms", "exchange\nms"} <= set(headings)


@pytest.mark.parametrize(
    ("plan", "ranks", "told"),
    [
        ("data-parallel", 4, "the plan has data-parallel encoders"),
        ("pair", 2, "the plan has packs that rank"),
    ],
)
def test_other_layers_are_refused(plans, digits, tmp_path, monkeypatch, plan, ranks, told):
    """Prevents untested Transformer Engine runs with data-parallel encoders or shared packs."""
    command = training(plans[plan], digits, tmp_path / "run")
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    (_, arguments), launch = parse_arguments(), RankLaunch(rank=0, world_size=ranks, local_rank=0)
    with pytest.raises(UserError, match=f"--provider te was given, but {told}"):
        load_run(replace(arguments, provider="te"), open_trainable(plans[plan]), launch)
