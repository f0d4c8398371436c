"""Plans with schedules other than 1F1B: predicted, checked and drawn, not trained."""

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from plan_cases import MODEL, example_lengths, origin_of
from plan_cases import request as request_of
from schedule_cases import SCHEDULES

from omnibal.base.errors import UserError
from omnibal.cli.trace import chrome_trace
from omnibal.job.check import check_plan, open_plan, training_obstacles
from omnibal.job.plan import write_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult, make_plan, predict_plan
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_spans
from omnibal.report.page import write_report

pytestmark = pytest.mark.quick


ASKED = request_of(lengths=example_lengths(origin_of(MODEL)))


@pytest.fixture(scope="module")
def base_result() -> PlanResult:
    return make_plan(ASKED)


@pytest.fixture(scope="module", params=SCHEDULES, ids=str)
def saved_plan(request, base_result, tmp_path_factory) -> tuple[PlanResult, Path]:
    """Return a plan of two stages, cut into the schedule's parts, and its folder."""
    parts, units = 2 * request.param.chunks, len(unit_spans(MODEL))
    cuts = [units * part // parts for part in range(1, parts)]
    recomputed = np.zeros((parts, sum(kind.is_layer for kind in ASKED.job.cost.kinds)), int)
    recomputed[0, 0] = 1
    stages = stages_from_cuts(MODEL, cuts, recomputed.tolist())
    changes = {"stages": stages, "schedule": request.param, "prediction": None}
    plan = base_result.plan.model_copy(update=changes)
    packs, lengths = base_result.data
    workload = ASKED.job.workload(packs, lengths, plan.pack_levels)
    prediction = predict_plan(plan, ASKED.job, packs, workload)
    result = replace(base_result, plan=plan.model_copy(update={"prediction": prediction}))
    folder = tmp_path_factory.mktemp("plans") / "plan"
    save_plan(result, folder)
    return result, folder


def test_plans_of_any_schedule_are_predicted_and_checked(saved_plan, tmp_path: Path):
    """Prevents a prediction for a schedule other than the plan's."""
    result, folder = saved_plan
    files, prediction = open_plan(folder), result.plan.prediction
    assert files.plan == result.plan
    assert len(prediction.stages) == 2
    assert sum(prediction.lost.model_dump().values()) == pytest.approx(prediction.step_ms)
    packs, lengths = files.data
    workload = files.job.workload(packs, lengths, files.plan.pack_levels)
    cost, stages_at = files.job.cost_of_all(files.plan.pack_levels), files.plan.stages_at_levels
    steps = simulate_levels(cost, stages_at, workload, files.plan.schedule)
    assert prediction.step_ms == pytest.approx(steps.step_ms.mean())
    assert not [each for each in training_obstacles(files.plan) if "schedule" in each]
    assert any("2 stages" in sentence for sentence in check_plan(folder))
    save_plan(result, tmp_path / "plan")
    changed = {"stages": files.plan.stages[1:], "prediction": None}
    write_plan(files.plan.model_copy(update=changed), tmp_path / "plan")
    with pytest.raises(UserError, match="entries in stages for pipeline size 2"):
        check_plan(tmp_path / "plan")


def test_reports_show_chunks_and_both_backwards(saved_plan, tmp_path: Path):
    """Prevents reports or traces that fail on chunks, or draw them as separate stages."""
    files = open_plan(saved_plan[1])
    schedule = files.plan.schedule
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
    for place in product(range(2), repeat=2):
        own = [block for block in blocks if (block["pid"], block["tid"]) == place]
        own.sort(key=lambda block: (block["ts"], block["dur"]))
        assert all(one["ts"] + one["dur"] <= after["ts"] + 1e-6 for one, after in pairwise(own))
