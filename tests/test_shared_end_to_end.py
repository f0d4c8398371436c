"""Plans whose packs ranks share, through the commands as they are typed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from end_to_end_cases import (
    losses,
    plan_of,
    ranks_succeed,
    records,
    succeed,
    training,
)

from megatron.vlm.run.arguments import parse_arguments
from megatron.vlm.run.launch import Launch
from megatron.vlm.run.pretrain import load_run, open_trainable
from omnibal.base.errors import UserError
from omnibal.job.plan import PlannedLevel, read_plan
from omnibal.job.plan_files import data_of_plan, save_plan
from omnibal.job.planner import PlanResult
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.levels import CutRule
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.unit_runs import stages_from_cuts


@pytest.fixture(scope="module")
def single_plan(lengths, tmp_path_factory) -> Path:
    """Packs of one level on one rank."""
    return plan_of(lengths, tmp_path_factory.mktemp("plans") / "single")


ENCODERS = DataParallelEncoders(
    pipelines=2,
    items_per_pass={"vision": 4},
    kept_items={"vision": 3},
    item_ms={"vision": 1.0},
    sharded=2,
)


def shared_plan(
    single: Path,
    folder: Path,
    data: int,
    contexts: tuple[int, int],
    beside: DataParallelEncoders | None = None,
) -> Path:
    """The same steps on so many ranks: short packs shared by `contexts[0]`, others by `[1]`."""
    plan = read_plan(single)
    packs, sample_lengths = data_of_plan(plan, single)
    short = int(np.median(packs.tokens))
    caps = plan.data.caps
    levels = [
        PlannedLevel(
            caps=Caps.of(tiles=caps["tiles"], tokens=cap),
            context=context,
            cut=CutRule.ZIGZAG,
            recompute=(again,),
        )
        for context, cap, again in zip(
            contexts, (short, caps["tokens"]), ((), ("language 0",)), strict=True
        )
    ]
    dealt = deal(packs, (packs.tokens > short).astype(np.int32), np.array(contexts), data)
    data_plan = plan.data.model_copy(
        update={
            "method": "other",
            "packs_sha256": dealt.sha256,
            "micro_batches_per_step": -(-plan.data.packs_per_step // data),
        }
    )
    shared = plan.model_copy(
        update={
            "parallel": Parallel(pipeline=1, data=data),
            "levels": tuple(levels),
            "data": data_plan,
            "settings_sha256": None,
            "prediction": None,
            "beside": beside,
        }
    )
    if beside is not None:
        stages = stages_from_cuts(plan.model.without_encoders(), ())
        shared = shared.model_copy(update={"stages": stages})
    shared = type(plan).model_validate_json(shared.model_dump_json())
    save_plan(PlanResult(plan=shared, data=(dealt, sample_lengths), search=None), folder)
    return folder


def deal(packs: ScheduledPacks, level: np.ndarray, contexts: np.ndarray, data: int):
    """Rows of packs of one level: full ones first, then the others, the widest first."""
    place = {"dp_rank": np.zeros(len(packs), np.int32), "slot": np.zeros(len(packs), np.int32)}
    for step in range(packs.steps):
        rows = []
        for one, context in enumerate(contexts):
            members = np.flatnonzero((packs.step == step) & (level == one))
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


def test_shared_packs_train_resume_and_validate_as_one_process(single_plan, digits, tmp_path):
    """Prevents: a plan with levels that the trainer cannot follow."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    heldout = ("--eval-data", digits / "heldout" / "meta.json", "--eval-samples", "12")
    validate = (*heldout, "--eval-interval", "3", "--max-new-tokens", "1")
    pair = shared_plan(single_plan, tmp_path / "pair", data=2, contexts=(1, 2))
    four = shared_plan(single_plan, tmp_path / "four", data=4, contexts=(2, 4), beside=ENCODERS)
    assert "levels of context size 1, 2" in succeed("-m", "omnibal", "check", pair)
    succeed(*training(single_plan, digits, alone, "--train-iters", "3", *validate))
    ranks_succeed(2, *training(pair, digits, shared, "--train-iters", "2"))
    resume = ("--load", shared, "--train-iters", "3", *validate)
    said = ranks_succeed(4, *training(four, digits, shared, *resume))
    assert f"resuming {shared} after step 2" in said
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)
    counted = [
        [(record["samples"], record["tokens"], record["tiles"]) for record in records(save)]
        for save in (shared, alone)
    ]
    assert counted[0] == counted[1]
    validated = [
        json.loads((save / "validation.jsonl").read_text().splitlines()[-1])
        for save in (shared, alone)
    ]
    assert validated[0]["step"] == validated[1]["step"] == 3
    assert validated[0]["loss"] == pytest.approx(validated[1]["loss"], rel=1e-4)
    assert validated[0]["loss_tokens"] == validated[1]["loss_tokens"]


def test_other_attention_is_refused(single_plan, digits, tmp_path, monkeypatch):
    """Prevents: Transformer Engine's attention over a part of a pack as if it were all of it."""
    plan = shared_plan(single_plan, tmp_path / "pair", data=2, contexts=(1, 2))
    command = training(plan, digits, tmp_path / "run")
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    arguments = replace(parse_arguments().run, provider="te")
    with pytest.raises(
        UserError, match="--provider te was given, but the plan has packs that rank"
    ):
        load_run(arguments, open_trainable(plan), Launch(rank=0, world_size=2, local_rank=0))
