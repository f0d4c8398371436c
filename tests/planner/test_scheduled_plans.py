"""Plans with other schedules than 1F1B: predicted, checked, drawn, and not yet trained."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import MODEL, example_lengths, origin_of, request
from schedule_cases import SCHEDULES

from omnibal.base.errors import UserError
from omnibal.job.check import check_plan, open_plan, training_obstacles
from omnibal.job.plan import write_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult, make_plan, prediction_of
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_words
from omnibal.report.page import write_report
from omnibal.report.trace import chrome_trace

pytestmark = pytest.mark.quick


def scheduled(schedule: PipelineSchedule) -> PlanResult:
    """A plan of two stages, cut anew into as many parts as the schedule has."""
    asked = request(lengths=example_lengths(origin_of(MODEL)))
    made = make_plan(asked)
    parts, units = 2 * schedule.chunks, len(unit_words(MODEL))
    cuts = [units * part // parts for part in range(1, parts)]
    kinds = sum(kind.is_layer for kind in asked.job.cost.kinds)
    recomputed = np.zeros((parts, kinds), int)
    recomputed[0, 0] = 1
    plan = made.plan.model_copy(
        update={
            "stages": stages_from_cuts(MODEL, cuts, recomputed.tolist()),
            "schedule": schedule,
            "prediction": None,
        }
    )
    packs, lengths = made.data
    workload = asked.job.workload(packs, lengths, plan.pack_levels)
    prediction = prediction_of(plan, asked.job, packs, workload)
    return replace(made, plan=plan.model_copy(update={"prediction": prediction}))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_plans_of_any_schedule_are_predicted_and_checked(schedule, tmp_path: Path):
    """Prevents a plan that is predicted in another schedule than the one that it names."""
    result = scheduled(schedule)
    save_plan(result, tmp_path / "plan")
    files = open_plan(tmp_path / "plan")
    assert files.plan == result.plan
    prediction = result.plan.prediction
    assert len(prediction.stages) == 2
    assert sum(prediction.lost.model_dump().values()) == pytest.approx(prediction.step_ms)
    packs, lengths = files.data
    workload = files.job.workload(packs, lengths, files.plan.pack_levels)
    cost, stages_at = files.job.cost_of_all(files.plan.pack_levels), files.plan.stages_at_levels
    steps = simulate_levels(cost, stages_at, workload, schedule)
    assert prediction.step_ms == pytest.approx(steps.step_ms.mean())
    refusals = [each for each in training_obstacles(files.plan) if "schedule" in each]
    assert not refusals
    assert any("2 stages" in sentence for sentence in check_plan(tmp_path / "plan"))
    changed = {"stages": files.plan.stages[1:], "prediction": None}
    write_plan(files.plan.model_copy(update=changed), tmp_path / "plan")
    with pytest.raises(UserError, match="entries in stages for pipeline size 2"):
        check_plan(tmp_path / "plan")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_reports_show_chunks_and_both_backwards(schedule, tmp_path: Path):
    """Prevents a report or a trace that fails on chunks, or draws them on stages of their own."""
    save_plan(scheduled(schedule), tmp_path / "plan")
    files = open_plan(tmp_path / "plan")
    write_report(files, None, tmp_path / "report.html", None)
    page = (tmp_path / "report.html").read_text()
    assert (">backward weight<" in page) == schedule.name.startswith("zb")
    assert (">forward of later chunks<" in page) == (schedule.chunks > 1)
    assert ">stage 1<" in page and ">stage 2<" not in page
    packs, lengths = files.data
    workload = files.job.workload(packs, lengths, files.plan.pack_levels)
    cost, stages_at = files.job.cost_of_all(files.plan.pack_levels), files.plan.stages_at_levels
    trace = json.loads(json.dumps(chrome_trace(cost, stages_at, workload, 0, schedule)))
    blocks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    micro_batches = int((workload.step == 0).sum())
    assert len(blocks) == micro_batches * 2 * schedule.chunks * len(schedule.passes)
    for rank in range(2):
        for stage in range(2):
            own = [block for block in blocks if (block["pid"], block["tid"]) == (rank, stage)]
            own.sort(key=lambda block: (block["ts"], block["dur"]))
            ends = [block["ts"] + block["dur"] for block in own]
            assert all(end <= after["ts"] + 1e-6 for end, after in zip(ends, own[1:], strict=False))
