"""Ranks begin their exchanges in one order, group by group, over every feature of the trainer."""

import functools
from itertools import pairwise

import data_parallel_encoder_cases as beside
import overlap_cases as overlap
import pytest
import shared_training_cases as shared
import tensor_parallel_cases as tensor_parallel
from checkpoint_cases import train_range
from evaluation_cases import pipeline_answers
from exchange_log import disagreements, logged_exchanges
from ranks import run_ranks
from toy import stages_of, toy_model, toy_plan

from omnibal.model.config import load_model


def logs_of(plan, steps, **options):
    """What every rank begins while it trains."""
    work = functools.partial(tensor_parallel.train_steps, **options)
    return run_ranks(plan.parallel, logged_exchanges, work, plan, steps)


def kinds_of(logs):
    return {each.kind for log in logs for each in log}


@pytest.mark.parametrize("name", ["pp2-dp2-vision", "dp4-experts"])
def test_ranks_that_share_packs(name):
    """Prevents: a rank that waits for ever where its packs are of other levels than its block's."""
    case = shared.CASES[name]
    plan = shared.plan_of(case)
    logs = logs_of(plan, **shared.options_of(case))
    assert disagreements(logs) == []
    assert min(map(len, logs)) > 20


@pytest.mark.parametrize("name", ["pp2-dp2", "tp2-sp-dp2-divided", "pp4", "pp2-dp2-zb-v"])
def test_data_parallel_encoders(tmp_path, name):
    """Prevents: a rank without items that skips an exchange of features which others begin."""
    case = beside.CASES[name]
    feed = beside.feed_of(case.drop_path)
    logs = logs_of(beside.plan_of(case), beside.STEPS[:2], save=tmp_path, feed=feed)
    assert disagreements(logs) == []


def test_overlapped_reduction_of_several_buckets(small_buckets):
    """Prevents: buckets that ranks reduce in the order in which their own backwards end."""
    plan = toy_plan(overlap.MODEL, stages_of(overlap.MODEL, 5), data=2)
    logs = logs_of(plan, overlap.STEPS)
    assert disagreements(logs) == []
    assert "send" in kinds_of(logs)


def save_and_go_on(links, plan, directory):
    train_range(links, plan, 0, 1, None, directory)
    train_range(links, plan, 1, 2, directory, None)


@pytest.mark.parametrize("sizes", [{"tensor": 2, "sequence_parallel": True}, {"data": 2}])
def test_saving_and_loading(tmp_path, sizes):
    """Prevents: a rank that gathers for a save, or asks for a load, what others do not."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4), **sizes)
    logs = run_ranks(plan.parallel, logged_exchanges, save_and_go_on, plan, tmp_path)
    assert disagreements(logs) == []
    assert any("gather" in kind for kind in kinds_of(logs))


def test_evaluation_with_experts(digits):
    """Prevents: a rank whose questions are answered that no longer exchanges tokens with others."""
    model = load_model("internvl-digits-moe")
    plan = toy_plan(model, stages_of(model, 3), data=2, expert=2)
    logs = run_ranks(plan.parallel, logged_exchanges, pipeline_answers, plan, digits)
    assert disagreements(logs) == []
    assert any("alltoall" in kind for kind in kinds_of(logs))


def test_another_order_is_noticed(small_buckets):
    """Prevents: a log that says all is well whatever ranks do."""
    plan = toy_plan(overlap.MODEL, stages_of(overlap.MODEL, 5), data=2)
    logs = logs_of(plan, overlap.STEPS)
    own = logs[3]
    shared_by_two = [at for at, each in enumerate(own) if each.peer is None and len(each.group) > 1]
    pairs = [
        (first, second)
        for first, second in pairwise(shared_by_two)
        if own[first].name == own[second].name and own[first] != own[second]
    ]
    assert pairs
    first, second = pairs[0]
    swapped = [*own]
    swapped[first], swapped[second] = own[second], own[first]
    (found,) = disagreements([*logs[:3], swapped])
    assert "on rank 3" in found
    received = next(at for at, each in enumerate(own) if each.kind == "recv_")
    (lost,) = disagreements([*logs[:3], own[:received] + own[received + 1 :]])
    assert lost.startswith("messages")
