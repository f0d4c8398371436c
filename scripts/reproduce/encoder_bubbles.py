"""How much of data-parallel encoders is hidden in pipelines' idle time, on H100s.

    python scripts/reproduce/encoder_bubbles.py [--micro-batches 8 16] [--data 2]

Simulated, with counted costs at the fitted rates of the cluster h100-80g. Packs of at most 8,192
tokens; seven samples of ten have 1 to 13 tiles, or images of 650 tokens in the median. "Pipeline"
is the step with encoders in the stages, "before and after" that with encoders beside the pipeline,
before all micro-batches and after them, "rounds" that with encoders in rounds, "alone" the stages
of "before and after" without encoders. What is hidden is the part of what encoders add to "alone"
that rounds save; the seconds are one core's for the plan with rounds.
"""

import argparse
import time
from dataclasses import replace

from encoder_exchange import SAMPLES_OF_PACK, Case, drawn
from paper import print_table

from omnibal.base.errors import DoesNotFit
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, PlanResult, make_ordered_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.steps.pack_settings import PackSettings

STEPS = 6


CASES = (
    Case("internvl3-8b", 1, 4),
    Case("internvl3-14b", 2, 4),
    Case("internvl3-38b", 4, 4),
    Case("internvl2-26b", 2, 4),
    Case("qwen3-vl-8b", 1, 4),
    Case("qwen3-vl-32b", 4, 4),
    Case("qwen3-vl-32b", 2, 8),
)


def row(case: Case, micro_batches: int, data_ranks: int) -> list[str]:
    """The predicted steps of a case."""
    model = load_model(case.model)
    packs, feature = micro_batches * data_ranks, model.encoders["vision"].feature
    caps = Caps.of(**{feature: 28 if feature == "tiles" else 7_000, "tokens": 8_192})
    sizes = Parallel(
        tensor=case.tensor,
        pipeline=case.pipeline,
        data=data_ranks,
        sequence_parallel=case.tensor > 1,
    )
    job = JobSpec(
        model=model, cluster=load_cluster("h100-80g"), parallel=sizes, precision="bf16",
        placement=EncoderPlacement.DATA_PARALLEL,
    )  # fmt: skip
    data = SampleData(
        settings=PackSettings(seed=0),
        lengths=drawn(model, int(packs * STEPS * SAMPLES_OF_PACK)),
        levels=(Level(caps=caps),),
        packs_per_step=packs,
    )
    name = [case.model, f"{case.tensor}/{case.pipeline}/{data_ranks}", f"{micro_batches}"]
    whole = replace(job, placement=EncoderPlacement.PIPELINE)
    try:
        inside = make_ordered_plan(PlanRequest(job=whole, data=data)).plan.prediction
    except DoesNotFit:
        inside = None
    request = PlanRequest(job=job, data=data)
    try:
        usual = make_ordered_plan(request, in_rounds=False)
    except DoesNotFit:
        return [*name, "does not fit", *[""] * 7]
    start = time.process_time()
    plan = make_ordered_plan(request).plan
    seconds = time.process_time() - start
    before, after = usual.plan.prediction, plan.prediction
    assert before is not None and after is not None
    alone_ms, rounds = _alone_ms(usual, job, data), plan.beside.rounds if plan.beside else ()
    return [
        *name,
        f"{inside.step_ms:,.0f}" if inside else "-",
        f"{before.step_ms:,.0f}",
        f"{after.step_ms:,.0f}",
        f"{alone_ms:,.0f}",
        f"{(before.step_ms - after.step_ms) / (before.step_ms - alone_ms):.0%}",
        f"{1 - after.step_ms / before.step_ms:.1%}",
        ", ".join(f"{len(each.rounds)}" for each in rounds) or "-",
        f"{seconds:.0f}",
    ]


def _alone_ms(usual: PlanResult, job: JobSpec, data: SampleData) -> float:
    """The step of a plan's stages without encoders."""
    assert usual.data is not None
    cost, stages_at = job.cost_of_all(data.levels), usual.plan.stages_at_levels
    workload = replace(job, beside=usual.plan.beside).workload(*usual.data, data.levels)
    times = replace(workload_times(cost, stages_at, workload), waits_ms=None)
    once = per_step_costs(cost, stages_at[0])
    return float(predict_steps(times, workload, once).step_ms.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--data", type=int, default=2, help="data-parallel ranks")
    given = parser.parse_args()
    columns = (
        "model", "TP/PP/DP", "micro-batches", "pipeline ms", "before and after ms", "rounds ms",
        "alone ms", "hidden", "saved", "rounds", "s",
    )  # fmt: skip
    rows = [row(case, each, given.data) for case in CASES for each in given.micro_batches]
    print_table("Encoders in idle time, H100", columns, rows)


if __name__ == "__main__":
    main()
