"""How far predicted step times and activation memory are from the measured ones, on this machine.

    python benchmarks/prediction.py [--rounds 20] [--patience 60] [--cases 0 2]

Each case profiles and trains a small model on random samples in turns, within one set of processes:
a round of the profiler, then two steps, so that both meet the machine at the same speeds. As long
as the patience lasts, passes are repeated in which other programs took more than a tenth of a core
(Linux; elsewhere none is), and the quietest count; a busy machine wants more patience. The
prediction is the product's own: costs fitted to the profile, packs of the product's packing, and
the very steps that were run, simulated. Means without the extreme tenths are compared, of rounds
and of steps. Memory is what autograd keeps on each stage at most; on CUDA, all that a step
allocates. Prints a row for each case, and whether the bars hold.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import trim_mean

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.measure.profiler import (
    OPTIMIZATION,
    ProfileOptions,
    Profiler,
    Round,
    peak_activation_bytes,
    random_batch,
)
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import Trainer, build_trainer, train_step
from omnibal.cost.model import pack_features
from omnibal.cost.profile import Measured, Profile
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.steps import deal_steps, draw_steps, size_load

STEP_TIME_BAR = 0.08
MEMORY_BAR = 0.03
STEPS = 10
"""Different ones, which take turns."""
STEPS_PER_PASS = 2
FOREIGN_LOAD = 0.1
"""Of a core, that other programs may take in a pass: less is as good as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its split, and the micro-batches that it trains on."""

    name: str
    vision: dict[str, int]
    """Changes to the vision tower of internvl-digits, and `language` likewise."""
    language: dict[str, int]
    cuts: tuple[int, ...]
    """Positions in the sequence of units where a stage begins."""
    recomputed: tuple[tuple[int, int], ...]
    """(vision, language) layers of each stage."""
    caps: Caps
    mean_text_tokens: int
    micro_batches: int


CASES = (
    Case(
        name="digits, cut after the projector",
        vision={},
        language={},
        cuts=(6,),
        recomputed=((0, 0), (0, 0)),
        caps=Caps.of(tiles=12, tokens=448),
        mean_text_tokens=24,
        micro_batches=3,
    ),
    Case(
        name="one stage",
        vision={},
        language={},
        cuts=(),
        recomputed=((0, 0),),
        caps=Caps.of(tiles=8, tokens=320),
        mean_text_tokens=24,
        micro_batches=4,
    ),
    Case(
        name="wider, cut in the vision tower",
        vision={"hidden_size": 128, "ffn_hidden_size": 512, "layers": 6},
        language={"layers": 2},
        cuts=(5,),
        recomputed=((0, 0), (0, 0)),
        caps=Caps.of(tiles=6, tokens=384),
        mean_text_tokens=40,
        micro_batches=4,
    ),
    Case(
        name="deeper, cut in the language tower, recomputing",
        vision={"layers": 3},
        language={"layers": 8, "hidden_size": 128, "ffn_hidden_size": 384, "vocab_size": 2048},
        cuts=(8,),
        recomputed=((2, 1), (0, 3)),
        caps=Caps.of(tiles=10, tokens=768),
        mean_text_tokens=60,
        micro_batches=4,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one case."""

    predicted_ms: float
    steps_ms: list[float]
    predicted_mib: tuple[float, ...]
    """Peak activations of each stage."""
    measured_mib: tuple[float, ...]
    foreign_cores: float
    """That other programs kept busy in the worst of the passes that count."""

    @property
    def measured_ms(self) -> float:
        return float(trim_mean(self.steps_ms, 0.1))

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_errors(self) -> list[float]:
        pairs = zip(self.predicted_mib, self.measured_mib, strict=True)
        return [predicted / measured - 1 for predicted, measured in pairs]


def model_of(case: Case) -> ModelConfig:
    """The quickstart's model with the case's changes."""
    digits = load_model("internvl-digits")
    changes = {
        "name": case.name,
        "encoders": {"vision": digits.vision.model_copy(update=case.vision)},
        "language": digits.language.model_copy(update=case.language),
    }
    return ModelConfig.model_validate(digits.model_copy(update=changes).model_dump())


def random_lengths(case: Case, model: ModelConfig, samples: int = 600) -> Lengths:
    """Samples of up to six tiles and a long tail of text, part of which carries loss."""
    rng = np.random.default_rng(0)
    tiles = rng.choice(7, samples, p=(0.15, 0.4, 0.15, 0.1, 0.1, 0.05, 0.05))
    text = 4 + rng.geometric(1 / (case.mean_text_tokens - 4), samples)
    text = np.minimum(text, case.caps["tokens"] // 2)
    return Lengths(
        items={"tiles": tiles.astype(np.int32)},
        tokens=(tiles * model.vision.tokens_per_item + text).astype(np.int32),
        loss_tokens=np.ceil(text * rng.uniform(0.1, 0.9, samples)).astype(np.int32),
        source=np.zeros(samples, np.int32),
        source_names=("random",),
        origin=None,
    )


def scheduled_packs(case: Case, lengths: Lengths) -> ScheduledPacks:
    """The first steps of the product's packs."""
    levels, load = [Level(caps=case.caps)], partial(size_load, lengths=lengths)
    steps = draw_steps(
        lengths, PackSettings(), levels, load, packs_per_step=case.micro_batches, packs_per_row=1
    )
    scheduled = deal_steps(steps, lengths, load, 1, levels)
    return scheduled.take(np.flatnonzero(scheduled.step < STEPS))


def plan_of(case: Case) -> Plan:
    """The case's split, as a hand-written plan."""
    model = model_of(case)
    return Plan(
        model=model,
        precision="fp32",
        parallel=Parallel(pipeline=len(case.cuts) + 1),
        stages=stages_from_cuts(model, case.cuts, case.recomputed),
        cluster=load_cluster("laptop-cpu"),
        data=None,
    )


def step_batches(
    model: ModelConfig, scheduled: ScheduledPacks, lengths: Lengths
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of every step, with random content."""
    loss_tokens = scheduled.packs.sums(lengths.loss_tokens)
    steps: list[list[MicroBatch]] = [[] for _ in range(scheduled.steps)]
    for row in np.flatnonzero(scheduled.dp_rank == 0).tolist():
        segments = tuple(lengths.tokens[scheduled.packs[row]].tolist())
        batch = random_batch(
            model, int(scheduled.column("tiles")[row]), segments, int(loss_tokens[row])
        )
        steps[scheduled.step[row]].append(batch)
    return steps


def run_step(trainer: Trainer, batches: list[MicroBatch]) -> None:
    train_step(trainer, MicroBatchStream.of(batches))


def run_case(case: Case, rounds: int, patience_s: float) -> Outcome | None:
    """Profile and train in turns; collective over the processes, of which the first returns."""
    launch, plan = Launch.from_environment(), plan_of(case)
    links = initialize_distributed(launch, plan.parallel, seed=0)
    lengths = random_lengths(case, plan.model)
    scheduled = scheduled_packs(case, lengths)
    steps = step_batches(plan.model, scheduled, lengths)
    trainer = build_trainer(plan, links, OPTIMIZATION, steps=STEPS, seed=0)
    measured_mib = peak_activations_mib(trainer, links, steps)
    options = ProfileOptions(
        max_tiles=case.caps["tiles"],
        max_tokens=case.caps["tokens"],
        tokens_per_sample=round(lengths.tokens.mean()),
        layers=4,
        repetitions=rounds,
    )
    profiler = Profiler(JobSpec.of_plan(plan), links, options)
    passes: list[Pass] = []
    deadline = time.monotonic() + patience_s
    while len(passes) < rounds or (
        sum(one.foreign_cores < FOREIGN_LOAD for one in passes) < rounds and within(deadline)
    ):
        passes.append(run_pass(profiler, trainer, steps, first=len(passes) * STEPS_PER_PASS))
    quietest = sorted(passes, key=lambda one: one.foreign_cores)[:rounds]
    profile = profiler.result([one.round_ms for one in quietest])
    shut_down_distributed()
    if launch.rank:
        return None
    each_ms, memories = predicted(plan, profile, scheduled, lengths)
    return Outcome(
        predicted_ms=float(np.mean([each_ms[number] for one in quietest for number in one.steps])),
        steps_ms=[ms for one in quietest for ms in one.steps_ms],
        predicted_mib=tuple(activations_gib(memory) * 1024 for memory in memories),
        measured_mib=measured_mib,
        foreign_cores=max(one.foreign_cores for one in quietest),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A round of the profiler and the steps after it."""

    round_ms: Round
    steps: list[int]
    steps_ms: list[float]
    foreign_cores: float
    """That other programs kept busy meanwhile, beyond those that this one leaves idle."""


def run_pass(
    profiler: Profiler, trainer: Trainer, steps: list[list[MicroBatch]], first: int
) -> Pass:
    """Profile, then train on the steps from `first` on, which come round and round."""
    numbers = [number % len(steps) for number in range(first, first + STEPS_PER_PASS)]
    watch = ForeignLoad()
    round_ms = profiler.round()
    steps_ms = [step_ms(trainer, steps[number]) for number in numbers]
    return Pass(round_ms=round_ms, steps=numbers, steps_ms=steps_ms, foreign_cores=watch.cores())


def peak_activations_mib(
    trainer: Trainer, links: PipelineLinks, steps: list[list[MicroBatch]]
) -> tuple[float, ...]:
    """The most that any of the steps needs, of every stage."""
    peaks = [
        peak_activation_bytes(trainer, partial(run_step, trainer, batches)) for batches in steps
    ]
    by_rank = torch.zeros(links.size, dtype=torch.float64, device=current_device())
    by_rank[links.rank] = max(peaks) / 2**20
    dist.all_reduce(by_rank)
    return tuple(by_rank.tolist())


def step_ms(trainer: Trainer, batches: list[MicroBatch]) -> float:
    """Wall-clock time of a step on this rank."""
    dist.barrier()
    start = time.perf_counter()
    run_step(trainer, batches)
    if has_cuda():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


class ForeignLoad:
    """Cores that other programs take from this one, from construction on; collective."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> torch.Tensor:
        """Seconds: wall clock, all cores busy, and this program's processes."""
        own = torch.tensor(time.process_time(), dtype=torch.float64)
        own = own.to(current_device())
        dist.all_reduce(own)
        stat = Path("/proc/stat")
        busy = own.item()
        if stat.is_file():
            user, nice, system = stat.read_text().split()[1:4]
            busy = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
        return torch.tensor([time.perf_counter(), busy, own.item()], dtype=torch.float64)

    def cores(self) -> float:
        """The same number on every rank: the first one's."""
        wall, busy, own = (self._now() - self._start).tolist()
        idle = max((os.cpu_count() or 1) - dist.get_world_size(), 0)
        cores = torch.tensor(max((busy - own) / wall - idle, 0.0), device=current_device())
        dist.broadcast(cores, 0)
        return cores.item()


def within(deadline: float) -> bool:
    """Whether the first rank's clock has not reached the deadline; the same on every rank."""
    left = torch.tensor(deadline - time.monotonic(), device=current_device())
    dist.broadcast(left, 0)
    return left.item() > 0


def predicted(
    plan: Plan, profile: Profile, scheduled: ScheduledPacks, lengths: Lengths
) -> tuple[np.ndarray, list[StageMemory]]:
    """Time of each step and memory of each stage that the product predicts from measured costs."""
    cost = JobSpec.of_plan(plan, Measured(profile)).cost
    features = pack_features(scheduled.packs, lengths, cost.features)
    workload = Workload.of(scheduled, features, plan.parallel.data)
    prediction = predict(cost, plan.model, plan.parallel, [plan.stages], scheduled, workload)
    memories = [stage.memory for stage in prediction.stages]
    return simulate_run(cost, plan.stages, workload).step_ms, memories


def activations_gib(memory: StageMemory) -> float:
    """What `peak_activation_bytes` measures on this kind of device."""
    return memory.activations_gib + (memory.transient_gib if has_cuda() else 0.0)


def launch_case(index: int, rounds: int, patience_s: float) -> Outcome:
    """Run one case in processes of its own: one thread each, as many as stages."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcome.pickle"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={len(CASES[index].cuts) + 1}", __file__, "--cases", str(index),
                "--rounds", str(rounds), "--patience", str(patience_s), "--output", output,
            ],
            env=environment,
            check=True,
        )  # fmt: skip
        return pickle.loads(output.read_bytes())


def row(case: Case, outcome: Outcome) -> str:
    """Time and memory of one case."""
    memory = "  ".join(
        f"{predicted:6.2f}/{measured:6.2f} {error:+5.1%}"
        for predicted, measured, error in zip(
            outcome.predicted_mib, outcome.measured_mib, outcome.memory_errors, strict=True
        )
    )
    measured_ms, median_ms = outcome.measured_ms, np.median(outcome.steps_ms)
    return (
        f"{case.name:<50}{outcome.predicted_ms:>9.0f}{measured_ms:>9.0f}"
        f"{outcome.time_error:>+8.1%}{median_ms:>8.0f}{outcome.foreign_cores:>8.2f}  {memory}"
    )


def verdict(name: str, errors: list[float], bar: float) -> str:
    worst = max(map(abs, errors))
    holds = "holds" if worst <= bar else "fails"
    return f"{name}: within {worst:.1%}; the bar of {bar:.0%} {holds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--patience", type=float, default=60, help="seconds for a case's rounds")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)))
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        outcome = run_case(CASES[arguments.cases[0]], arguments.rounds, arguments.patience)
        if outcome is not None:
            arguments.output.write_bytes(pickle.dumps(outcome))
        return
    print(
        f"{'':<50}{'predicted':>9}{'measured':>9}{'':>8}{'median':>8}{'others':>8}  "
        "peak activations of each stage\n"
        f"{'case':<50}{'ms':>9}{'ms':>9}{'error':>8}{'ms':>8}{'cores':>8}  "
        "predicted/measured MiB, error",
        flush=True,
    )
    outcomes = []
    for index in arguments.cases:
        outcomes.append(launch_case(index, arguments.rounds, arguments.patience))
        print(row(CASES[index], outcomes[-1]), flush=True)
    print(verdict("step time", [outcome.time_error for outcome in outcomes], STEP_TIME_BAR))
    of_median = [o.predicted_ms / float(np.median(o.steps_ms)) - 1 for o in outcomes]
    print(verdict("step time, of the median step", of_median, STEP_TIME_BAR))
    memory_errors = [error for outcome in outcomes for error in outcome.memory_errors]
    print(verdict("peak activations", memory_errors, MEMORY_BAR))


if __name__ == "__main__":
    main()
