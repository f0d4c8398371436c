"""Pipeline schedules beside 1F1B at the same memory cap: the OmniBal paper's Table 9, Qwen3-VL-32B.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --micro-batches 8 --effort 0.2

Every job's samples are made (`benchmarks/goals.py`) and packed once. 1F1B's stages are searched for
as always; each other schedule's parts by `omnibal.pipeline.chunk_search`. All times are simulated,
with costs counted at the clusters' rates; "proven" is the most that any cut of the schedule could
still save of its own step. The time is that of the process, all schedules together.
"""

import argparse
import time
from dataclasses import dataclass

from goals import Job

from omnibal import training_job
from omnibal.base.errors import DoesNotFit
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan, search_chunks
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.search.schedule_choice import schedules_of
from omnibal.steps.pack_settings import PackSettings

EVERY = frozenset({"interleaved", "zb-h1", "zb-v"})

CAPS = Caps.of(tokens=4096, tiles=9)
"""Limits of packs in most rows."""


_SHORT, _LONG, _SAMPLES = 0.6, 1.3, 20_000
"""Spreads of made lengths, and their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model, its devices and its packs."""

    model: str
    cluster: str = "a100-80g"
    tensor: int
    pipeline: int
    caps: Caps = CAPS
    items: str = "tiles"
    tail: float = _SHORT

    def request(self, micro_batches: int) -> PlanRequest:
        """The request of a plan in 1F1B."""
        made = Job(
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
            lengths=made.lengths(_SAMPLES),
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


def compared(row: Row, micro_batches: int, effort: float) -> str:
    """A line of the table."""
    request, start = row.request(micro_batches), time.process_time()
    usual = make_plan(request)
    assert usual.search is not None
    before_ms, found = usual.search.step_ms, []
    for schedule in schedules_of(EVERY, request.job):
        again = PlanRequest(job=request.job, data=request.data, schedule=schedule)
        try:
            search = search_chunks(again, again.workload(), effort)
        except DoesNotFit:
            continue
        found.append((search.step_ms, search.gap, f"{schedule.name} x {schedule.chunks}"))
    seconds = time.process_time() - start
    shape = f"TP {row.tensor} PP {row.pipeline}"
    first = f"{row.model:<26} {shape:<10} {micro_batches:>4} {before_ms:>10,.0f}"
    if not found:
        return f"{first}  no other schedule fits"
    best_ms, gap, name = min(found)
    every = ", ".join(f"{each} {1 - ms / before_ms:.1%}" for ms, _, each in sorted(found))
    saved = 1 - best_ms / before_ms
    return (
        f"{first} {best_ms:>10,.0f} {saved:>7.1%} {name:<15} {gap:>6.1%} {seconds:>5.0f} s  {every}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual search")
    given = parser.parse_args()
    print("model, sizes, micro-batches, 1F1B ms, best ms, saved, schedule, proven, time, all")
    for micro_batches in given.micro_batches:
        for row in ROWS:
            print(compared(row, micro_batches, given.effort), flush=True)


if __name__ == "__main__":
    main()
