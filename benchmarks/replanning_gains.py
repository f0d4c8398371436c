"""What planning anew gains, measured in runs of pretrain_vlm.py whose passes take known times.

    python benchmarks/replanning_gains.py [--what spoiled slow-rank] [--stages 2 4] [--seed 0]

Every rank trains a small model, and sleeps at the end of each forward and backward until the pass
has lasted what the right costs say of its stage and its micro-batch, tens of ms. So passes have
times that are known, whatever else the machine does, and all else of a step is the trainer's own.

"spoiled": the plan is made with a profile in which one kind of layer is 40 % too slow or too fast.
"slow-stage": it is made with the right one, and the devices of a stage are 1.5 times as slow.
"slow-rank": those of one of two data-parallel ranks are, without a pipeline. It is trained for
`--before` steps, planned anew, by `--replan-at` or by `omnibal replan` in turns, and trained on.
The same steps are trained, from the same checkpoint, with the plan kept, and with one that was made
for the same steps by the right costs, with the same losses within 1e-4. A case's times are the
means of its steps, and shares are medians of the ratio of two runs, so that a step in which another
program holds up a run counts little. A seed draws what kinds of units cost, and the order of
samples.

It prints a table, and the cases as JSON.
"""

import argparse
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from forked_ranks import fork_launched
from megatron.core import parallel_state
from rich.console import Console
from rich.table import Table
from torch.utils.hooks import RemovableHandle

import megatron.vlm.run.pretrain as run_of_trainer
import megatron.vlm.step.schedule as schedule_of_trainer
from megatron.vlm.checkpoint.files import TRACKER_FILE, checkpoint_path
from megatron.vlm.run.loop import TrainingLoop
from megatron.vlm.step.train import StepResult
from omnibal.cost.profile import Measured, Profile, UnitMeasurement, model_sha256
from omnibal.cost.refitted import Refit, Refitted
from omnibal.cost.source import CostSource
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.job.check import open_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_ordered_plan
from omnibal.job.runlog import RUN_FILE, read_run
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.stage_cost import workload_times
from omnibal.steps.pack_settings import PackSettings

REPOSITORY = Path(__file__).parent.parent
MICRO_BATCHES = 6
CAPS = Caps.of(tiles=12, tokens=400)
SAMPLES = 240
SLOW = 1.5
SPOILED = 1.4
WARM_UP = 2
"""First steps after a start, which are not compared."""
FORWARD_MS = {
    "vision_embed": {"fixed": 0.5, "tiles": 0.1},
    "vision_layer": {"fixed": 0.4, "tiles": 0.375},
    "projector": {"fixed": 0.5, "tiles": 0.1},
    "language_embed": {"fixed": 0.5, "tokens": 0.002},
    "language_layer": {"fixed": 0.4, "tokens": 0.006, "squared_tokens": 8e-6},
    "head": {"fixed": 0.5, "loss_tokens": 0.02},
}
"""What units cost in a forward, before a seed changes it: far above what they compute."""
BACKWARD = 1.9
"""Time of a backward, in forwards."""
SHAPES = (
    (0, 30, 500, 20),
    (1, 64, 2000, 10),
    (3, 128, 9000, 100),
    (7, 256, 20000, 40),
    (12, 512, 90000, 300),
)
"""Tiles, tokens, squared tokens and loss tokens of what the profile has measured."""


def small_model() -> ModelConfig:
    """The quickstart's model with more and narrower layers: little is computed."""
    model = load_model("internvl-digits")
    narrow = {"hidden_size": 16, "heads": 2, "ffn_hidden_size": 32}
    language = model.language.model_copy(update=narrow | {"layers": 14, "kv_heads": 2})
    wide = model.with_tower("vision", layers=8, **narrow)
    return wide.model_copy(update={"language": language})


def profile_of(model: ModelConfig, factors: Mapping[str, float]) -> Profile:
    """What a profile measures of units that cost so many times `FORWARD_MS`."""
    names = ("tiles", "tokens", "squared_tokens", "loss_tokens")
    measured = []
    for unit, each in FORWARD_MS.items():
        for shape in SHAPES:
            features = dict(zip(names, shape, strict=True))
            counted = {"fixed": 1} | features
            ms = factors.get(unit, 1.0) * sum(rate * counted[name] for name, rate in each.items())
            times = {"forward_ms": ms, "backward_ms": BACKWARD * ms, "recompute_ms": ms}
            measured.append(
                UnitMeasurement(unit=unit, activation_bytes=10_000, **features, **times)
            )
    return Profile(
        device="waiting process", precision="fp32", model=model.name,
        model_sha256=model_sha256(model), tensor=1, processes=1, measurements=tuple(measured),
    )  # fmt: skip


def drawn_factors(seed: int, scale: float) -> dict[str, float]:
    """What kinds of units cost in a seed, over `FORWARD_MS`."""
    rng = np.random.default_rng(seed)
    return {unit: scale * float(rng.uniform(0.8, 1.25)) for unit in FORWARD_MS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is wrong with the costs that a plan is made with."""

    name: str
    parallel: Parallel
    planned: CostSource
    """Costs that the plan is made with."""
    right: CostSource
    """Costs that passes have."""
    by_command: bool
    """Whether `omnibal replan` plans anew, and not the run itself."""
    seed: int

    def job(self, source: CostSource) -> JobSpec:
        """The job by some costs."""
        ranks = self.parallel.world_size
        cluster = load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": ranks})
        return JobSpec(
            model=small_model(), cluster=cluster, parallel=self.parallel, precision="fp32",
            cost_source=source,
        )  # fmt: skip


def cases_of(what: Sequence[str], stages: Sequence[int], seed: int, scale: float) -> Iterator[Case]:
    """All cases of a seed."""
    model, factors = small_model(), drawn_factors(seed, scale)
    right = Measured(profile_of(model, factors))
    for size in stages:
        case = partial(Case, parallel=Parallel(pipeline=size), seed=seed)
        pairs = [(u, f) for u in ("vision_layer", "language_layer") for f in (SPOILED, 1 / SPOILED)]
        for number, (unit, factor) in enumerate(pairs if "spoiled" in what else []):
            wrong = Measured(profile_of(model, factors | {unit: factors[unit] * factor}))
            direction = "too slow" if factor > 1 else "too fast"
            yield case(
                name=f"{unit} {direction}", planned=wrong, right=right,
                by_command=(number + seed) % 2 == 1,
            )  # fmt: skip
        for by_command in (False, True) if "slow-stage" in what else ():
            slow = (seed + by_command) % size
            slowness = tuple(SLOW if stage == slow else 1.0 for stage in range(size))
            refit = Refit(root_sha256="", step=0, pipeline=size, slowness=slowness)
            truth = Refitted(right, refit)
            yield case(name=f"stage {slow} slow", planned=right, right=truth, by_command=by_command)
    for by_command in (False, True) if "slow-rank" in what else ():
        slow = (seed + by_command) % 2
        of_ranks = tuple((SLOW if rank == slow else 1.0,) for rank in range(2))
        refit = Refit(root_sha256="", step=0, slow_ranks=of_ranks)
        yield Case(
            name=f"rank {slow} slow", parallel=Parallel(pipeline=1, data=2), planned=right,
            right=Refitted(right, refit), by_command=by_command, seed=seed,
        )  # fmt: skip


class Device:
    """Stand-in for this rank's device: passes of a step last as long as given."""

    def __init__(self) -> None:
        self._forward_s: deque[float] = deque()
        self._backward_s: deque[float] = deque()
        self._began = 0.0
        self._hooks: list[RemovableHandle] = []

    def attach(self, stage: torch.nn.Module) -> None:
        """Run the forwards of a stage, in place of those of another one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            stage.register_forward_pre_hook(self.begin_forward),
            stage.register_forward_hook(self.end_forward),
        ]

    def begin(self, forward_ms: np.ndarray, backward_ms: np.ndarray) -> None:
        """Take the times of a step's micro-batches, which run in their order. Both [m]"""
        assert not (self._forward_s or self._backward_s), "a pass of the step before is missing"
        self._forward_s.extend((forward_ms / 1e3).tolist())
        self._backward_s.extend((backward_ms / 1e3).tolist())

    def begin_forward(self, *_: Any) -> None:
        """A stage's forward begins."""
        self._began = time.perf_counter()

    def end_forward(self, *_: Any) -> None:
        """It has computed."""
        _sleep_until(self._began + self._forward_s.popleft())

    def backward(self, compute: Callable[..., None], *outputs: Any) -> None:
        """A stage's backward."""
        began = time.perf_counter()
        compute(*outputs)
        _sleep_until(began + self._backward_s.popleft())


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Times that passes of a plan take by the right costs."""

    case: Case

    def of(
        self, plan: Plan, packs: ScheduledPacks, lengths: Lengths, part: int, dp_rank: int
    ) -> dict[int, np.ndarray]:
        """Of every step, forwards and backwards of a rank's micro-batches, [2, m]."""
        job = self.case.job(self.case.right)
        workload = job.workload(packs, lengths, plan.pack_levels)
        cost = job.cost_of_all(plan.pack_levels)
        times = workload_times(cost, plan.stages_at_levels, workload)
        both = np.stack([times.forward_ms[:, part], times.backward_ms[:, part]])
        own = workload.dp_rank == dp_rank
        return {
            step: both[:, own & (workload.step == step)] for step in np.unique(packs.step).tolist()
        }


def be_rank(case: Case, words: Sequence[str]) -> None:
    """Run pretrain_vlm.py on a device that takes the right times."""
    with suppress(OSError):
        # Wake up before other programs: devices do not queue for cores.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    device, times = Device(), PassTimes(case=case)

    class Loop(TrainingLoop):
        """The trainer's loop on the device."""

        @cached_property
        def pass_times(self) -> dict[int, np.ndarray]:
            trainer, data = self._trainer, self._data
            device.attach(trainer.stage)
            [part] = trainer.links.parts
            dp_rank = parallel_state.get_data_parallel_rank()
            return times.of(trainer.plan, data.scheduled, data.lengths, part, dp_rank)

        def _train(self, step: int) -> StepResult:
            device.begin(*self.pass_times[step])
            return super()._train(step)

    backward = partial(device.backward, schedule_of_trainer.run_backward)
    sys.argv = list(words)
    with (
        patch.object(run_of_trainer, "TrainingLoop", Loop),
        patch.object(schedule_of_trainer, "run_backward", backward),
    ):
        runpy.run_path(words[0], run_name="__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Where a case is run, and for how long."""

    digits: Path
    folder: Path
    before: int
    after: int

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.before + self.after

    @property
    def compared(self) -> np.ndarray:
        """Steps of which times are compared."""
        return np.arange(self.before + WARM_UP, self.steps)

    def train(self, case: Case, plan: Path, save: Path, steps: int, *more: object) -> None:
        """Train to some step, from the newest checkpoint there if any."""
        resumed = ("--load", save) if (save / TRACKER_FILE).exists() else ()
        words = (
            "pretrain_vlm.py", "--plan", plan, "--data", self.digits / "train" / "meta.json",
            "--tokenizer-model", self.digits / "tokenizer.model", "--save", save,
            "--num-workers", "1", "--train-iters", steps, *resumed, *more,
        )  # fmt: skip
        _ranks_succeed(case, [str(word) for word in words], save.with_suffix(".txt"))

    def copied(self, run: Path, name: str) -> Path:
        """A run's directory with the checkpoint after the first steps alone."""
        save = run.with_name(name)
        save.mkdir()
        shutil.copytree(checkpoint_path(run, self.before), checkpoint_path(save, self.before))
        (save / TRACKER_FILE).write_text(str(self.before))
        return save

    def check_alike(self, saves: Sequence[Path]) -> None:
        """Refuse runs that did not train the same samples in every step, with the same losses but
        for the order of sums."""
        first, *others = ({one.step: one for one in read_run(save / RUN_FILE)} for save in saves)
        for other in others:
            for step in self.compared.tolist():
                is_near = math.isclose(first[step].loss, other[step].loss, rel_tol=1e-4)
                if not is_near or first[step].samples_sha256 != other[step].samples_sha256:
                    raise SystemExit(f"step {step} was trained otherwise with another plan")

    def step_ms(self, save: Path) -> np.ndarray:
        """Measured times of the compared steps."""
        found = {record.step: record.step_ms for record in read_run(save / RUN_FILE)}
        return np.array([found[step] for step in self.compared.tolist()])

    def packs_of(self, directory: Path) -> str:
        """How many of the packs of the compared steps each data-parallel rank has."""
        packs, _ = open_plan(directory).steps
        return " + ".join(map(str, np.bincount(packs.dp_rank[np.isin(packs.step, self.compared)])))

    def predicted_ms(self, directory: Path, source: CostSource | None = None) -> np.ndarray:
        """Times of the compared steps by a plan's own costs, or by others."""
        files = open_plan(directory)
        plan, (packs, lengths) = files.plan, files.steps
        job = files.job if source is None else replace(files.job, cost_source=source)
        workload = job.workload(packs, lengths, plan.pack_levels).of_steps(self.compared)
        cost = job.cost_of_all(plan.pack_levels)
        return simulate_levels(cost, plan.stages_at_levels, workload, plan.schedule).step_ms


def _ranks_succeed(case: Case, words: Sequence[str], output: Path) -> None:
    pids = fork_launched(partial(be_rank, case, words), case.parallel.world_size, output)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise SystemExit(f"a rank of {case.name} failed: {output.read_text()}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What planning anew has gained in a case."""

    case: str
    stages: int
    ranks: int
    seed: int
    way: str
    layers: tuple[str, ...]
    """Layers of the stages, vision + language, of the plan kept, the new one and the right one."""
    kept_ms: float
    replanned_ms: float
    right_ms: float
    predicted_ms: float
    """Of the new plan, by the costs that it was made with."""
    kept_gain: float
    """Share of a step that the right plan saves of the one kept."""
    gain: float
    """Share that the new plan saves."""
    predicted_gain: float
    over_right: float
    """Step of the new plan over that of the right one, less 1."""
    packs: tuple[str, ...]
    """Packs of each data-parallel rank in the compared steps, of the same three."""
    slowness: tuple[float, ...]
    """Found of the stages, or of the ranks."""


def measured(case: Case, runs: Runs) -> Outcome:
    """Run a case."""
    folder = runs.folder
    first, right = folder / "first", folder / "right plan"
    lengths = read_lengths([folder.parent / "lengths.parquet"])
    save_plans(case, lengths, first, right, runs.steps)
    run = folder / "run"
    if case.by_command:
        runs.train(case, first, run, runs.before)
        second = folder / "second"
        _run("-m", "omnibal", "replan", first, "--run", run, "-o", second)
        kept, with_right = (runs.copied(run, name) for name in ("kept", "right"))
        runs.train(case, second, run, runs.steps)
    else:
        at = ("--replan-at", runs.before, "--save-interval", runs.before)
        runs.train(case, first, run, runs.steps, *at)
        kept, with_right = (runs.copied(run, name) for name in ("kept", "right"))
        second = max((run / "plans").glob("step_*"), default=first)
    runs.train(case, first, kept, runs.steps)
    runs.train(case, right, with_right, runs.steps)
    return outcome(case, runs, (first, second, right), (kept, run, with_right))


def outcome(
    case: Case, runs: Runs, plans: tuple[Path, Path, Path], saves: tuple[Path, Path, Path]
) -> Outcome:
    """Compare the steps after planning anew: the plan kept, the new one, the right one."""
    runs.check_alike(saves)
    kept_ms, replanned_ms, right_ms = (runs.step_ms(save) for save in saves)
    first, second, _ = plans
    source = open_plan(second).job.cost_source
    predicted_ms = runs.predicted_ms(second)
    before_ms = runs.predicted_ms(first, source)
    refit = source.refit if isinstance(source, Refitted) else Refit(root_sha256="", step=0)
    slowness = (*refit.slowness, *(max(of_rank) for of_rank in refit.slow_ranks))
    return Outcome(
        case=case.name,
        stages=case.parallel.pipeline,
        ranks=case.parallel.data,
        seed=case.seed,
        way="omnibal replan" if case.by_command else "--replan-at",
        layers=tuple(layers_of(plan) for plan in plans),
        packs=tuple(runs.packs_of(plan) for plan in plans),
        kept_ms=float(kept_ms.mean()),
        replanned_ms=float(replanned_ms.mean()),
        right_ms=float(right_ms.mean()),
        predicted_ms=float(predicted_ms.mean()),
        kept_gain=1 - float(np.median(right_ms / kept_ms)),
        gain=1 - float(np.median(replanned_ms / kept_ms)),
        predicted_gain=1 - float(np.median(predicted_ms / before_ms)),
        over_right=float(np.median(replanned_ms / right_ms)) - 1,
        slowness=tuple(round(each, 3) for each in slowness),
    )


def layers_of(directory: Path) -> str:
    """Layers of a plan's stages, of the vision encoder + of the language model."""
    stages = open_plan(directory).plan.stages
    towers = ("vision", "language")
    return " ".join(
        "+".join(str(stage.number_of_layers(each)) for each in towers) for stage in stages
    )


def save_plans(case: Case, lengths: Lengths, first: Path, right: Path, steps: int) -> None:
    """Make the plan by the wrong costs, and for the same steps the one by the right costs."""
    job = case.job(case.planned)
    per_step = MICRO_BATCHES * case.parallel.data
    data = SampleData(
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=per_step,
        settings=PackSettings(seed=case.seed, epochs=1),
    )
    of_epoch = make_ordered_plan(PlanRequest(job=job, data=data)).plan
    assert of_epoch.data is not None
    epochs = -(-steps // of_epoch.data.steps) + 1
    data = replace(data, settings=PackSettings(seed=case.seed, epochs=epochs))
    made = make_ordered_plan(PlanRequest(job=job, data=data))
    save_plan(made, first)
    same = SampleData.of_plan(made.plan, made.data)
    save_plan(make_ordered_plan(PlanRequest(job=case.job(case.right), data=same)), right)


def _run(*command: object) -> None:
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )


def prepare(folder: Path) -> Path:
    """Make the data, and scan their lengths beside it."""
    digits = folder / "digits"
    _run("tools/make_digits_dataset.py", "--output", digits, "--samples", SAMPLES)
    tokenizer = digits / "tokenizer.model"
    _run(
        "-m", "omnibal", "lengths", digits / "train" / "meta.json", "--model", "internvl-digits",
        "--tokenizer-model", tokenizer, "-o", folder / "lengths.parquet",
    )  # fmt: skip
    return digits


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """All cases: steps in ms, and what was gained beside what was predicted."""
    table = Table(title="Steps after planning anew, ms")
    columns = ("case", "stages", "seed", "by", "kept", "anew", "predicted", "right", "gain")
    for name in (*columns, "predicted", "of right", "over right"):
        table.add_column(name, no_wrap=True)
    for one in outcomes:
        times = (one.kept_ms, one.replanned_ms, one.predicted_ms, one.right_ms)
        shares = (one.gain, one.predicted_gain, one.kept_gain, one.over_right)
        table.add_row(
            one.case, f"{one.stages} x {one.ranks}", str(one.seed), one.way,
            *(f"{ms:.0f}" for ms in times), *(f"{share:.1%}" for share in shares),
        )  # fmt: skip
    return table


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whats = ("spoiled", "slow-stage", "slow-rank")
    parser.add_argument("--what", nargs="+", choices=whats, default=list(whats))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", type=int, default=50, help="steps before planning anew")
    parser.add_argument("--after", type=int, default=30, help="steps after it")
    parser.add_argument("--scale", type=float, default=1.0, help="of all passes' times")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of those measured, from 0 on")
    given = parser.parse_args()
    os.chdir(REPOSITORY)
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        digits = prepare(Path(name))
        cases = dict(enumerate(cases_of(given.what, given.stages, given.seed, given.scale)))
        for number in given.cases or cases:
            case = cases[number]
            folder = Path(name) / f"case {number}"
            folder.mkdir()
            runs = Runs(digits=digits, folder=folder, before=given.before, after=given.after)
            outcomes.append(measured(case, runs))
            print(json.dumps(asdict(outcomes[-1])), flush=True)
            shutil.rmtree(folder)
    Console(width=160, stderr=True).print(table_of(outcomes))


if __name__ == "__main__":
    main()
