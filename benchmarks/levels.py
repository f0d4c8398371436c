"""Levels against one level on this machine: samples a second, loss, and what was predicted.

    python benchmarks/levels.py [--rounds 6] [--patience 240]

Four processes train a small language model on texts whose longest has 32 times the tokens of the
median, in three ways that take turns, step by step, within one set of processes:

    levels              short texts on one rank, packs of up to the longest text shared by four
    one level, shared   all packs are of up to the longest text and shared by four ranks, as where
                        one rank has no memory for it: what HBP (arXiv 2503.07680) compares with
    one level, alone    the same packs on one rank each, where there is memory for that

All start from the same weights and see the same texts; steps have equally many tokens. The
prediction is the product's: costs fitted to a profile that is measured in between, by as many
processes at once, exchanges at measured rates, and the very steps that were run, simulated. Each
process has an equal part of the machine's cores where the system can give it one
(`own_cores.py`), else they share them; those rounds count in which other programs took least. Core
ms are of all cores, for a sample. Memory is no limit here, so the caps are given.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from own_cores import own_cores
from prediction import FOREIGN_LOAD, ForeignLoad, within
from rich.console import Console
from scipy.stats import trim_mean
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models, pre_tokenizers

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.profiler import OPTIMIZATION, ProfileOptions, Profiler
from megatron.vlm.measure.profiler import Round as ProfilerRound
from megatron.vlm.measure.rates import measure_rates
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import Trainer, build_trainer, train_step
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.cost.profile import Measured, Profile
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, PlannedLevel
from omnibal.job.plan_data import SampleData
from omnibal.model.config import ClusterConfig, LanguageConfig, ModelConfig, load_cluster
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.rates import Rates
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.unit_runs import stages_from_cuts

RANKS = 4
MEDIAN_TOKENS = 64
LONGEST_TOKENS = 32 * MEDIAN_TOKENS
SHORT_TOKENS = LONGEST_TOKENS // RANKS
STEP_TOKENS = 4 * LONGEST_TOKENS
SAMPLES = 960
PIECES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
COLLECTIVE_SIZES = MeasuredSizes(
    rows=(64,), inner=(128,), outer=(128,), collective_bytes=(1 << 14, 1 << 18, 1 << 21)
)
_STEPS_PER_PROFILE = 4
"""Steps of every way between two rounds of the profiler."""
BAR = 0.1
"""Largest error of a prediction."""

MODEL = ModelConfig(
    name="small-text",
    chat_template="qwen2.5",
    language=LanguageConfig(
        layers=4, hidden_size=128, heads=4, kv_heads=4, ffn_hidden_size=384, vocab_size=384
    ),
)


def _level(tokens: int, context: int) -> Level:
    # Heads are exchanged: with as many of keys as of queries, that is fewer bytes than a gather.
    return Level(caps=Caps.of(tokens=tokens), context=context, exchange=ContextExchange.HEADS)


WAYS: dict[str, tuple[Level, ...]] = {
    "levels": (_level(SHORT_TOKENS, 1), _level(LONGEST_TOKENS, RANKS)),
    "one level, shared": (_level(LONGEST_TOKENS, RANKS),),
    "one level, alone": (_level(LONGEST_TOKENS, 1),),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one way."""

    samples: int
    """Samples of an epoch."""
    predicted_ms: float
    """Time of an epoch."""
    epochs_ms: list[float]
    core_ms: float
    """Time of all cores in an epoch."""
    last_loss: float
    """Mean loss over the last epoch."""
    foreign_cores: float
    """Cores that other programs kept busy in the worst round that counts."""

    @property
    def measured_ms(self) -> float:
        return float(trim_mean(self.epochs_ms, 0.1))

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.measured_ms * 1e3

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def write_texts(folder: Path, seed: int = 0) -> None:
    """Write texts, lognormal in length, and a tokenizer that has a token a byte."""
    rng = np.random.default_rng(seed)
    overhead = 32
    tokens = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), 0.8, SAMPLES), 40, LONGEST_TOKENS / 2)
    tokens[:: SAMPLES // 24] = rng.uniform(LONGEST_TOKENS / 2, LONGEST_TOKENS, 24)
    tokens[0] = LONGEST_TOKENS
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    with (folder / "texts.jsonl").open("w") as lines:
        for count in tokens.astype(int) - overhead:
            # Each word follows from the one before, so that there is something to learn.
            first = int(rng.integers(len(words)))
            text = " ".join(words[(first + 3 * place) % len(words)] for place in range(count))
            said = [("system", ""), ("user", "?"), ("assistant", text[:count])]
            messages = [{"role": role, "content": content} for role, content in said]
            lines.write(json.dumps({"messages": messages}) + "\n")
    (folder / "meta.json").write_text(json.dumps({"texts": {"annotation": "texts.jsonl"}}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokens(models.BPE(dict(zip(alphabet, range(256), strict=True)), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(PIECES))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One way, ready to train."""

    plan: Plan
    packs: ScheduledPacks
    lengths: Lengths
    trainer: Trainer
    steps: list["StepOfRank"]

    def predicted_ms(self, profile: Profile, cluster: ClusterConfig) -> float:
        """Predict an epoch from measured costs and rates."""
        plan = self.plan.model_copy(update={"cluster": cluster})
        job, levels = JobSpec.of_plan(plan, Measured(profile)), plan.pack_levels
        workload = job.workload(self.packs, self.lengths, levels)
        simulated = simulate_levels(job.cost_of_all(levels), plan.stages_at_levels, workload)
        return float(simulated.step_ms.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOfRank:
    """This rank's micro-batches of a step."""

    batches: list[MicroBatch]
    rows_are_full: bool

    def train(self, trainer: Trainer) -> tuple[float, float, float]:
        """Train on it; returns the time in ms, that of this rank's core, and the loss."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        stream = MicroBatchStream.of(self.batches)
        result = train_step(trainer, replace(stream, rows_are_full=self.rows_are_full))
        core_ms = (time.process_time() - busy) * 1e3
        return (time.perf_counter() - start) * 1e3, core_ms, result.loss


def one_node() -> ClusterConfig:
    """Describe this machine as one node of all processes, as rates are measured within a node."""
    return load_cluster("laptop-cpu").model_copy(update={"gpus_per_node": RANKS})


def prepared(
    levels: Sequence[Level], reader: SampleReader, lengths: Lengths, links: PipelineLinks
) -> Prepared:
    """Plan one way by hand, with the product's packs and steps."""
    job = JobSpec(
        model=MODEL,
        cluster=one_node(),
        parallel=Parallel(pipeline=1, data=RANKS),
        precision="fp32",
    )
    data = SampleData(
        lengths=lengths,
        packs_per_step=packs_per_step(levels),
        levels=tuple(levels),
    )
    packs, lengths = data.schedule(job)
    plan = Plan(
        model=MODEL,
        precision="fp32",
        parallel=job.parallel,
        stages=stages_from_cuts(MODEL, []),
        levels=tuple(PlannedLevel(**dict(level), recompute=((),)) for level in levels),
        cluster=job.cluster,
        data=None,
    )
    return Prepared(
        plan=plan,
        packs=packs,
        lengths=lengths,
        trainer=build_trainer(plan, links, OPTIMIZATION, steps=100, seed=0),
        steps=list(steps_of_rank(plan, packs, lengths, reader)),
    )


def packs_per_step(levels: Sequence[Level]) -> int:
    """Packs of a step, of which one that ranks share counts once for each."""
    return STEP_TOKENS * levels[0].context // levels[0].caps["tokens"]


def steps_of_rank(
    plan: Plan, packs: ScheduledPacks, lengths: Lengths, reader: SampleReader
) -> Iterator[StepOfRank]:
    """Read all steps."""
    sharing = Sharing(dp_rank=parallel_state.get_data_parallel_rank(), levels=plan.pack_levels)
    for step in range(packs.steps):
        rows = sharing.rows(packs, step, step + 1)
        dataset = PackDataset(reader, packs, lengths, rows, plan.stages[0], sharing=sharing)
        read = [dataset[place] for place in range(len(rows))]
        of_step = packs.take(np.flatnonzero(packs.step == step))
        yield StepOfRank(
            batches=[one for one in read if isinstance(one, MicroBatch)],
            rows_are_full=sharing.rows_are_full(of_step, RANKS),
        )


def run_ways(folder: Path, rounds: int, patience_s: float, launch: Launch) -> dict[str, Outcome]:
    """Profile and train all ways in turns; collective over the processes."""
    torch.set_num_threads(1)
    links = initialize_distributed(launch, Parallel(pipeline=1, data=RANKS), seed=0)
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    annotations = Annotations.open(folder / "meta.json")
    lengths = scan_lengths(annotations, MODEL, tokenizer, lambda done: None).lengths
    reader = SampleReader(annotations, tokenizer, MODEL)
    ways = {name: prepared(levels, reader, lengths, links) for name, levels in WAYS.items()}
    profiler = Profiler(
        JobSpec.of_plan(ways["levels"].plan),
        links,
        ProfileOptions(
            max_tiles=0,
            max_tokens=LONGEST_TOKENS,
            tokens_per_sample=round(float(lengths.tokens.mean())),
            layers=MODEL.language.layers,
            repetitions=rounds,
            contexts=(RANKS,),
        ),
    )
    run_round(profiler, ways)  # to warm up
    found: list[Round] = []
    deadline = time.monotonic() + patience_s
    while len(found) < rounds or (
        sum(one.foreign_cores < FOREIGN_LOAD for one in found) < rounds and within(deadline)
    ):
        found.append(run_round(profiler, ways))
    quietest = sorted(found, key=lambda one: one.foreign_cores)[:rounds]
    rates = mean_rates([one.rates for one in quietest])
    cluster = one_node().model_copy(update={"rates": {"fp32": rates}})
    profile = profiler.result([profiled for one in quietest for profiled in one.profiled])
    shut_down_distributed()
    return {
        name: Outcome(
            samples=len(lengths),
            predicted_ms=way.predicted_ms(profile, cluster),
            epochs_ms=[one.epoch_ms[name] for one in quietest],
            core_ms=float(np.mean([one.core_ms[name] for one in quietest])),
            last_loss=found[-1].loss[name],
            foreign_cores=quietest[-1].foreign_cores,
        )
        for name, way in ways.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """An epoch of every way, rounds of the profiler in between, and the exchanges."""

    profiled: list[ProfilerRound]
    rates: Rates
    epoch_ms: dict[str, float]
    core_ms: dict[str, float]
    """Time of all ranks' cores, which other programs lengthen less."""
    loss: dict[str, float]
    """Mean over the epoch's steps."""
    foreign_cores: float
    """Cores that other programs kept busy meanwhile."""


def run_round(profiler: Profiler, ways: dict[str, Prepared]) -> Round:
    """Measure everything once; the ways take turns step by step."""
    watch = ForeignLoad()
    profiled: list[ProfilerRound] = []
    trained: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(max(len(way.steps) for way in ways.values())):
        if number % _STEPS_PER_PROFILE == 0:
            profiled.append(profiler.round())
        for name, way in ways.items():
            if number < len(way.steps):
                trained[name].append(way.steps[number].train(way.trainer))
    sums = torch.tensor([np.sum(each, axis=0) for each in trained.values()])
    core_ms = sums[:, 1].clone()
    dist.all_reduce(core_ms)
    return Round(
        profiled=profiled,
        rates=measure_rates("this machine", "fp32", COLLECTIVE_SIZES, Console(quiet=True)),
        epoch_ms=dict(zip(ways, sums[:, 0].tolist(), strict=True)),
        core_ms=dict(zip(ways, core_ms.tolist(), strict=True)),
        loss={name: float(np.mean([one[2] for one in each])) for name, each in trained.items()},
        foreign_cores=watch.cores(),
    )


def mean_rates(rates: Sequence[Rates]) -> Rates:
    """Collectives at their mean time over all rounds, and what is hidden of them beside
    computation; products are in the profile."""
    measured = [[each.ms for each in one.collectives] for one in rates]
    times = np.array(measured, np.float64).mean(axis=0)
    collectives = [
        each.model_copy(update={"ms": float(ms)})
        for each, ms in zip(rates[0].collectives, times, strict=True)
    ]
    hidden = float(np.mean([one.hidden for one in rates]))
    update = {"collectives": tuple(collectives), "products": (), "hidden": hidden}
    return rates[0].model_copy(update=update)


def launch_ways(rounds: int, patience_s: float) -> dict[str, Outcome]:
    """Run in processes of their own: one thread each."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_texts(folder)
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={RANKS}", __file__, "--folder", folder, "--rounds", str(rounds),
                "--patience", str(patience_s),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )  # fmt: skip
        return pickle.loads((folder / "outcome.pickle").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="epochs of every way")
    parser.add_argument("--patience", type=float, default=240, help="seconds for quiet rounds")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        launch = Launch.from_environment()
        with own_cores(launch.rank, RANKS) as is_device:
            outcomes = run_ways(given.folder, given.rounds, given.patience, launch)
        if launch.rank == 0:
            cores = "an equal part each" if is_device else "shared, as no control group can be made"
            print(f"cores: {cores}")
            (given.folder / "outcome.pickle").write_bytes(pickle.dumps(outcomes))
        return
    outcomes = launch_ways(given.rounds, given.patience)
    tokens = f"{MEDIAN_TOKENS} (median) to {LONGEST_TOKENS} tokens"
    print(f"{SAMPLES} texts of {tokens}, {os.cpu_count()} cores, {RANKS} processes")
    print(
        f"{'':<20}{'samples/s':>11}{'predicted':>11}{'error':>8}{'spread':>9}{'others':>8}{'loss':>9}"
    )
    for name, one in outcomes.items():
        predicted = one.samples / one.predicted_ms * 1e3
        spread = np.ptp(one.epochs_ms) / one.measured_ms
        print(
            f"{name:<20}{one.samples_per_second:>11.1f}{predicted:>11.1f}{one.error:>+8.1%}"
            f"{spread:>9.1%}{one.foreign_cores:>8.2f}{one.core_ms / one.samples:>9.1f}"
            f"{one.last_loss:>9.4f}"
        )
    levels, shared = outcomes["levels"], outcomes["one level, shared"]
    gain = levels.samples_per_second / shared.samples_per_second
    predicted_gain = shared.predicted_ms / levels.predicted_ms
    print(f"levels over one level, shared: {gain:.2f} times, predicted {predicted_gain:.2f}")
    worst = max(abs(one.error) for one in (levels, shared))
    print(f"worst error {worst:.1%}; the bar of {BAR:.0%} {'holds' if worst <= BAR else 'fails'}")


if __name__ == "__main__":
    main()
