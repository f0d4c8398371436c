"""What pipeline schedules save beside 1F1B, measured in processes and simulated.

    python benchmarks/schedule_gains.py [--steps 3] [--micro-batches 4 8] [--scale 1] [--row 2]
    python benchmarks/schedule_gains.py --computing [--steps 20]

Waiting stages stand in for devices: four processes run the trainer's own schedule, messages, links
and autograd calls, and every part of the model waits in its passes as long as it was planned to
compute there, times `--scale`: in a forward, in the first part of a backward and in the product for
weight gradients each by itself. The parts are those that the planner finds for every schedule at
one memory cap (a row of `benchmarks/schedules.py`); "unequal" micro-batches are the packs of its
first steps, "equal" ones the mean of all packs. What is sent is of a small model. So the order of
passes and the waits between stages are measured, and computing is not. Simulated steps are of the
same passes, with sends that take no time; a measured pass also takes its host about a millisecond.
Megatron-core's 1F1B and interleaved 1F1B run the same parts.

With `--computing`, two processes compute the passes of a small model instead, on a core each. The
simulated gains are of the durations that each schedule's own passes had, in the median of the
rounds: what other programs take of the cores is in them, but not how it comes between passes.

A time is the median of the rounds, of unequal steps of each of three by itself; in a round, all
schedules run one after another. Gains are shares of 1F1B's time.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked_ranks import outcomes_of, save_outcome
from rich.console import Console
from rich.table import Table
from schedule import TEXT_PACK, maximum, plan_of, run_ours, run_stock, stock_stages
from schedules import ROWS, Row
from torch import distributed as dist

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.measure.profiler import OPTIMIZATION, random_batch
from megatron.vlm.model.deferred_weights import DeferredWeights, Product
from megatron.vlm.model.stage import ByTower, boundary_shapes
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.clock import Interval, Phase, PhaseClock, each_ms
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.pass_times import in_place
from megatron.vlm.step.schedule import run_forward_backward
from megatron.vlm.step.train import Trainer, build_trainer
from omnibal.job.plan import Plan
from omnibal.job.planner import PlanRequest, make_plan, searched_parts
from omnibal.model.config import ModelConfig, load_model
from omnibal.model.parallel import Parallel
from omnibal.pipeline.operation_graph import schedule_graph
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.simulate import simulate_schedule
from omnibal.pipeline.stage_cost import StageTimes, workload_times

SCHEDULES = (
    ONE_FORWARD_ONE_BACKWARD,
    PipelineSchedule(name="interleaved", chunks=2),
    PipelineSchedule(name="interleaved", chunks=4),
    PipelineSchedule(name="zb-h1"),
    PipelineSchedule(name="zb-v", chunks=2),
)
EFFORT = 0.1
"""Share of the usual search for parts."""
TOKENS = 64
"""Of what waiting stages send."""
DISTINCT_STEPS = 3
COMPUTING_STAGES = 2
COMPUTED_LAYERS = 8
PHASES = {
    Pass.FORWARD: Phase.FORWARD,
    Pass.BACKWARD: Phase.BACKWARD,
    Pass.BACKWARD_INPUT: Phase.BACKWARD,
    Pass.BACKWARD_WEIGHT: Phase.BACKWARD_WEIGHT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one schedule waits for in some steps."""

    schedule: PipelineSchedule
    packs: str
    times: StageTimes
    """Of every micro-batch of all steps, [steps * m] rows."""
    steps: int

    @property
    def micro_batches(self) -> int:
        return len(self.times.forward_ms) // self.steps

    @property
    def stages(self) -> int:
        return self.times.forward_ms.shape[1] // self.schedule.chunks

    def of_step(self, step: int) -> StageTimes:
        """The micro-batches of a step."""
        first = step * self.micro_batches
        return self.times.rows(np.arange(first, first + self.micro_batches))

    def simulated_ms(self, step: int) -> float:
        """The step."""
        times = self.of_step(step)
        pass_ms = {kind: times.pass_ms(kind) for kind in self.schedule.passes}
        return simulated_ms(self.schedule, self.stages, pass_ms)


def simulated_ms(
    schedule: PipelineSchedule, stages: int, pass_ms: Mapping[Pass, np.ndarray]
) -> float:
    """A step of given passes, [m, k] of every kind, with sends that take no time."""
    micro_batches, parts = pass_ms[Pass.FORWARD].shape
    no_link = np.zeros((1, micro_batches, parts - 1))
    graph = schedule_graph(schedule, stages, micro_batches)
    every = {kind: ms[None] for kind, ms in pass_ms.items()}
    timeline = simulate_schedule(graph, every, no_link, no_link, np.array([micro_batches]))
    return float(timeline.step_ms[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Distinct steps of one schedule, all together, each the median of its rounds."""

    schedule: PipelineSchedule
    micro_batches: int
    packs: str
    simulated_ms: float
    measured_ms: float
    stock_ms: float | None = None
    """Of Megatron-core's own schedule; None where it has none of that name."""


def planned_cases(row: Row, micro_batches: int, scale: float) -> Iterator[Case]:
    """Every schedule's parts for steps of so many micro-batches, with equal and unequal ones."""
    request = row.request(micro_batches)
    for schedule in SCHEDULES:
        of_schedule = replace(request, schedule=schedule)
        times = scaled(planned_times(of_schedule), scale)
        rows = DISTINCT_STEPS * micro_batches
        unequal, mean = times.rows(np.arange(rows)), times.rows(np.zeros(micro_batches, int))
        for name in ("forward_ms", "backward_ms", "weight_ms"):
            getattr(mean, name)[:] = getattr(times, name).mean(axis=0)
        yield Case(schedule=schedule, packs="equal", times=mean, steps=1)
        yield Case(schedule=schedule, packs="unequal", times=unequal, steps=DISTINCT_STEPS)


def planned_times(request: PlanRequest) -> StageTimes:
    """Times of all micro-batches on the parts that are found for a schedule."""
    workload = request.workload()
    if request.schedule == ONE_FORWARD_ONE_BACKWARD:
        stages_at = make_plan(request).plan.stages_at_levels
    else:
        stages_at = searched_parts(request, workload, EFFORT).stages_at
    # In the order of steps and, as there is one rank, of slots.
    rows = np.lexsort((workload.slot, workload.step))
    return workload_times(request.job.cost_of_all(request.data.levels), stages_at, workload).rows(
        rows
    )


def scaled(times: StageTimes, scale: float) -> StageTimes:
    """Times of devices that are so much faster."""
    return replace(
        times,
        forward_ms=times.forward_ms * scale,
        backward_ms=times.backward_ms * scale,
        weight_ms=times.weight_ms * scale,
    )


def wait(ms: float) -> None:
    """Stand for a device that computes so long."""
    time.sleep(max(ms, 0.0) / 1e3)


class Wait(Product):
    """A product that takes a given time, forward and in both parts of its backward."""

    def __init__(self, shape: tuple[int, ...], ms: Mapping[Pass, float]) -> None:
        self.shape, self.ms = shape, ms

    def outputs(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wait(self.ms[Pass.FORWARD])
        return rows.new_zeros(self.shape)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wait(self.ms[Pass.BACKWARD_INPUT])
        return gradient.new_zeros(TOKENS, 1, weight.shape[-1])

    def add_weight_gradient(
        self, rows: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor
    ) -> None:
        wait(self.ms[Pass.BACKWARD_WEIGHT])


class WholeWait(torch.autograd.Function):
    """A product whose backward is one pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, product: Wait, weight: torch.Tensor) -> torch.Tensor:
        ctx.product, ctx.weight = product, weight
        return product.outputs(rows, weight)

    @staticmethod
    def backward(ctx, *gradients):
        of_rows = ctx.product.input_gradient(gradients[0], ctx.weight)
        ctx.product.add_weight_gradient(of_rows, gradients[0], ctx.weight)
        return of_rows, None, None


class WaitingPart(torch.nn.Module):
    """A part of the model that waits in its passes; micro-batches come to it in their order."""

    def __init__(self, plan: Plan, part: int) -> None:
        super().__init__()
        self.plan, self.part = plan, part
        self.width = plan.model.language.hidden_size
        self.weight = torch.nn.Parameter(torch.zeros(1, self.width))
        self.weight.main_grad = torch.zeros(1, self.width)
        in_two = Pass.BACKWARD_WEIGHT in plan.schedule.passes
        self.deferred = DeferredWeights([self.weight]) if in_two else None
        self.passes: Iterator[Mapping[Pass, float]] = iter(())

    @property
    def module(self) -> "WaitingPart":
        """Itself, as what holds it with other ranks has it."""
        return self

    def begin(self, times: StageTimes) -> None:
        """Take the times of a step's micro-batches."""
        kinds = (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
        of_part = np.stack([times.pass_ms(kind)[:, self.part] for kind in kinds], axis=1)
        self.passes = iter([dict(zip(kinds, each, strict=True)) for each in of_part.tolist()])
        self.received: ByTower = {}

    def set_input_tensor(self, received: ByTower) -> None:
        self.received = received

    def forward(self, batch: MicroBatch) -> ByTower | torch.Tensor:
        if self.part:
            [rows] = self.received.values()
        else:
            # What the first part embeds has a gradient too.
            rows = torch.zeros(TOKENS, 1, self.width, requires_grad=True)
        if self.part == len(self.plan.stages) - 1:
            return self._product((), rows)
        shapes = boundary_shapes(self.plan, self.part, batch.shape)
        return {name: self._product(shape, rows) for name, shape in shapes.items()}

    def _product(self, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        product = Wait(shape, next(self.passes))
        if self.deferred is not None:
            return self.deferred.multiply(product, rows, self.weight)
        return WholeWait.apply(rows, product, self.weight)


def small_model(layers: int) -> ModelConfig:
    """The quickstart's language model, of so many layers."""
    model = load_model("internvl-digits").without_encoders()
    language = model.language.model_copy(update={"layers": layers})
    return model.model_copy(update={"language": language})


Run = Callable[[Sequence[MicroBatch]], object]


@dataclass(kw_only=True, slots=True, eq=False)
class WaitingRunner:
    """One case on this rank."""

    case: Case
    parts: Sequence[WaitingPart]
    runs: Mapping[str, Run]
    """Schedules of the name by whose they are."""
    found_ms: dict[str, list[float]]

    @classmethod
    def of(cls, case: Case, links: PipelineLinks) -> "WaitingRunner":
        """Build the parts that this stage holds; collective."""
        model = small_model(case.stages * case.schedule.chunks)
        plan, links = plan_of(model, case.stages, case.schedule), links.for_schedule(case.schedule)
        parts = [WaitingPart(plan, part) for part in links.parts]
        runs: dict[str, Run] = {"ours": partial(run_ours, plan, parts, links)}
        if case.schedule.name in ("1f1b", "interleaved"):
            stages = stock_stages(plan, parts, links, varying=False)
            runs["stock"] = partial(run_stock, plan, stages, links)
        return cls(case=case, parts=parts, runs=runs, found_ms={name: [] for name in runs})

    def run(self, number: int) -> None:
        """Measure a step by every schedule of the name; collective."""
        batch = MicroBatch(tiles=0, tokens=TOKENS, segment_tokens=(TOKENS,))
        times = self.case.of_step(number % self.case.steps)
        for name, run in self.runs.items():
            for part in self.parts:
                part.begin(times)
            ms = until_all_are_done_ms(run, [replace(batch)] * self.case.micro_batches)
            if number >= 0:
                self.found_ms[name].append(ms)

    @property
    def outcome(self) -> Outcome:
        """All rounds."""
        case, steps = self.case, range(self.case.steps)
        total_ms = {
            name: float(sum(np.median(found[step :: case.steps]) for step in steps))
            for name, found in self.found_ms.items()
        }
        return Outcome(
            schedule=case.schedule,
            micro_batches=case.micro_batches,
            packs=case.packs,
            simulated_ms=sum(map(case.simulated_ms, steps)),
            measured_ms=total_ms["ours"],
            stock_ms=total_ms.get("stock"),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class ComputingRunner:
    """A schedule's parts of a small model on this rank, which compute."""

    trainer: Trainer
    batches: Sequence[MicroBatch]
    found_ms: list[float]
    passes_ms: list[np.ndarray]
    """Passes of this stage, [kinds, m, k], of every round."""

    @classmethod
    def of(
        cls, schedule: PipelineSchedule, links: PipelineLinks, micro_batches: int
    ) -> "ComputingRunner":
        """Build the parts that this stage holds; collective."""
        plan = plan_of(small_model(COMPUTED_LAYERS), links.size, schedule)
        trainer = build_trainer(plan, links, OPTIMIZATION, steps=1, seed=0)
        batches = [random_batch(plan.model, *TEXT_PACK) for _ in range(micro_batches)]
        return cls(trainer=trainer, batches=batches, found_ms=[], passes_ms=[])

    def run(self, number: int) -> None:
        """Measure a step; collective."""
        trainer, clock = self.trainer, PhaseClock()
        trainer.zero_gradients()

        def run(batches: Sequence[MicroBatch]) -> None:
            clock.switch(Phase.WAIT)
            stream = MicroBatchStream.of(batches)
            run_forward_backward(trainer.plan, trainer.models, trainer.links, stream, clock)

        ms = until_all_are_done_ms(run, self.batches)
        passes_ms = self._passes_ms(clock.stop())
        if number >= 0:
            self.found_ms.append(ms)
            self.passes_ms.append(passes_ms)

    def _passes_ms(self, intervals: Sequence[Interval]) -> np.ndarray:
        """What every pass of this stage took; 0 of others. [kinds, m, k]"""
        links, schedule = self.trainer.links, self.trainer.plan.schedule
        found = np.zeros((len(Pass), len(self.batches), links.last_part + 1))
        for kind in schedule.passes:
            in_turn_ms = each_ms(intervals, PHASES[kind])
            found[kind][:, links.parts] = in_place(links, in_turn_ms, kind)
        return found

    @property
    def outcome(self) -> Outcome:
        """All rounds; collective."""
        schedule, links = self.trainer.plan.schedule, self.trainer.links
        of_all = torch.from_numpy(np.median(self.passes_ms, axis=0))
        dist.all_reduce(of_all)
        pass_ms = {kind: of_all[kind].numpy() for kind in schedule.passes}
        return Outcome(
            schedule=schedule,
            micro_batches=len(self.batches),
            packs="equal",
            simulated_ms=simulated_ms(schedule, links.size, pass_ms),
            measured_ms=float(np.median(self.found_ms)),
        )


def until_all_are_done_ms(run: Run, batches: Sequence[MicroBatch]) -> float:
    """Time of a step until the last stage is done; collective."""
    dist.barrier()
    start = time.perf_counter()
    run(batches)
    return maximum((time.perf_counter() - start) * 1e3)


def come_first() -> None:
    """Wake up before other programs, where the system lets it: devices do not queue for cores."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def run_waiting(rank: int, rounds: int, folder: Path, cases: Sequence[Case]) -> None:
    """Measure all cases in turns, as one of the stages that wait."""
    come_first()
    links = joined(rank, cases[0].stages, folder)
    runners = [WaitingRunner.of(case, links) for case in cases]
    save_outcome(outcomes_in_turns(runners, rounds), rank, folder)


def run_computing(rank: int, rounds: int, folder: Path, micro_batches: Sequence[int]) -> None:
    """Measure all schedules in turns, as one of the stages that compute."""
    links = joined(rank, COMPUTING_STAGES, folder)
    runners = [
        ComputingRunner.of(schedule, links, number)
        for number in micro_batches
        for schedule in SCHEDULES
    ]
    save_outcome(outcomes_in_turns(runners, rounds), rank, folder)


def joined(rank: int, stages: int, folder: Path) -> PipelineLinks:
    """The links of a pipeline of forked processes; collective."""
    launch = Launch(rank=rank, world_size=stages, local_rank=0)
    meeting = f"file://{folder / 'meeting'}"
    return initialize_distributed(launch, Parallel(pipeline=stages), 0, meeting)


def outcomes_in_turns(
    runners: Sequence[WaitingRunner] | Sequence[ComputingRunner], rounds: int
) -> list[Outcome]:
    """Run every runner once a round, after a round that is not counted; collective."""
    for number in range(-1, rounds):
        for runner in runners:
            runner.run(number)
    outcomes = [runner.outcome for runner in runners]
    shut_down_distributed()
    return outcomes


def table_of(outcomes: Sequence[Outcome], stages: int) -> Table:
    """All outcomes, each beside that of 1F1B for the same micro-batches."""
    table = Table(title=f"Steps on {stages} stages, ms")
    for column in ("micro-batches", "schedule"):
        table.add_column(column, no_wrap=True)
    columns = ("simulated", "measured", "over", "gain", "measured", "points", "core's", "ours / it")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    usual = {
        (each.micro_batches, each.packs): each
        for each in outcomes
        if each.schedule == ONE_FORWARD_ONE_BACKWARD
    }
    for each in outcomes:
        table.add_row(*cells(each, usual[each.micro_batches, each.packs]))
    return table


def cells(outcome: Outcome, usual: Outcome) -> list[str]:
    """A row: step, gain and Megatron-core's step."""
    simulated, measured, stock = outcome.simulated_ms, outcome.measured_ms, outcome.stock_ms
    gain, measured_gain = 1 - simulated / usual.simulated_ms, 1 - measured / usual.measured_ms
    return [
        f"{outcome.micro_batches}, {outcome.packs}",
        f"{outcome.schedule.name}, {outcome.schedule.chunks}",
        f"{simulated:,.0f}",
        f"{measured:,.0f}",
        f"{measured / simulated - 1:+.1%}",
        f"{gain:.1%}",
        f"{measured_gain:.1%}",
        f"{100 * (measured_gain - gain):+.1f}",
        "" if stock is None else f"{stock:,.0f}",
        "" if stock is None else f"{measured / stock:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="rounds of all schedules")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--scale", type=float, default=1.0, help="of planned times")
    parser.add_argument("--row", type=int, default=2, help="of benchmarks/schedules.py")
    parser.add_argument("--computing", action="store_true", help="two stages that compute")
    given = parser.parse_args()
    if given.steps < DISTINCT_STEPS:
        parser.error(f"--steps {given.steps} was given; each of {DISTINCT_STEPS} steps needs one")
    torch.set_num_threads(1)
    prepare_megatron_core()
    if given.computing:
        stages = COMPUTING_STAGES
        run = partial(run_computing, micro_batches=given.micro_batches)
    else:
        cases = [
            case
            for micro_batches in given.micro_batches
            for case in planned_cases(ROWS[given.row], micro_batches, given.scale)
        ]
        stages = cases[0].stages
        run = partial(run_waiting, cases=sorted(cases, key=lambda each: each.packs))
    [outcomes, *_] = outcomes_of(run, stages, given.steps)
    console = Console(width=150)
    console.print(table_of(outcomes, stages))


if __name__ == "__main__":
    main()
