"""Pipeline schedules against 1F1B at the same memory cap, for the paper's Table 9 and Qwen3-VL-32B.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --micro-batches 8 --effort 0.2

Samples are synthetic (`benchmarks/goals.py`). 1F1B is searched as in `omnibal plan`, parts of other
schedules by `omnibal.pipeline.chunk_search`. Times are simulated, with counted costs; "proven"
bounds what any cut of the schedule could still save; "time" is CPU seconds of all schedules.
"""

import argparse
import time
from dataclasses import dataclass

from goals import Job

from omnibal import training_job
from omnibal.base.errors import DoesNotFit
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.pack_settings import PackSettings
from omnibal.pipeline.chunk_search import search_parts
from omnibal.search.schedule_choice import schedules_of

OTHER_SCHEDULES = frozenset({"interleaved", "zb-h1", "zb-v"})
CAPS = Caps.of(tokens=4096, tiles=9)
_SHORT, _LONG, _SAMPLES = 0.6, 1.3, 20_000  # two values of `Job.tail`, and the number of samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model with its devices and packs."""

    model: str
    cluster: str = "a100-80g"
    tensor: int
    pipeline: int
    caps: Caps = CAPS
    items: str = "tiles"
    tail: float = _SHORT

    def request(self, micro_batches: int) -> PlanRequest:
        """Return the request for a plan by 1F1B."""
        job = Job(
            name=self.model,
            model=self.model,
            cluster=self.cluster,
            gpus=1,
            trainer=None,
            recipe="-",
            tail=self.tail,
            items=self.items,
            longest=self.caps["tokens"],
        )
        sizes = Parallel(tensor=self.tensor, pipeline=self.pipeline)
        data = SampleData(
            lengths=job.lengths(_SAMPLES),
            settings=PackSettings(),
            levels=(Level(caps=self.caps),),
            packs_per_step=micro_batches,
        )
        return PlanRequest(job=training_job(self.model, self.cluster, parallel=sizes), data=data)


ROWS = (
    Row(model="internvl-chat-1.5-6b-20b", tensor=2, pipeline=4),
    Row(model="internvl-chat-1.5-6b-34b", tensor=4, pipeline=4),
    Row(model="internvit-6b-llama3-8b", tensor=2, pipeline=4),
    Row(model="internvit-6b-llama3-70b", tensor=4, pipeline=8),
    Row(model="internvit-6b-qwen1.5-110b", tensor=8, pipeline=8),
    Row(
        model="qwen3-vl-32b",
        cluster="h200-141g",
        tensor=4,
        pipeline=4,
        caps=Caps.of(tokens=16_384, image_tokens=8_192),
        items="image_tokens",
        tail=_LONG,
    ),
)


def compare_schedules(row: Row, micro_batches: int, effort: float) -> str:
    """Return a line of the table."""
    request, start = row.request(micro_batches), time.process_time()
    plan = make_plan(request)
    assert plan.search is not None
    base_ms, results = plan.search.step_ms, []
    for schedule in schedules_of(OTHER_SCHEDULES, request.job):
        other = PlanRequest(job=request.job, data=request.data, schedule=schedule)
        try:
            task = other.job.split_task(other.workload(), other.data.levels, schedule)
            search = search_parts(task, effort)
        except DoesNotFit:
            continue
        results.append((search.step_ms, search.gap, f"{schedule.name} x {schedule.chunks}"))
    seconds = time.process_time() - start
    shape = f"TP {row.tensor} PP {row.pipeline}"
    line = f"{row.model:<26} {shape:<10} {micro_batches:>4} {base_ms:>10,.0f}"
    if not results:
        return f"{line}  no other schedule fits"
    best_ms, gap, best = min(results)
    savings = ", ".join(f"{name} {1 - ms / base_ms:.1%}" for ms, _, name in sorted(results))
    line += f" {best_ms:>10,.0f} {1 - best_ms / base_ms:>7.1%} {best:<15} {gap:>6.1%}"
    return f"{line} {seconds:>5.0f} s  {savings}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--effort", type=float, default=1.0, help="share of the default search")
    given = parser.parse_args()
    print("model, sizes, micro-batches, 1F1B ms, best ms, saved, schedule, proven, time, all")
    for micro_batches in given.micro_batches:
        for row in ROWS:
            print(compare_schedules(row, micro_batches, given.effort), flush=True)


if __name__ == "__main__":
    main()
