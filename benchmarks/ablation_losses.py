"""Whether balance costs loss: common practice and the full system on the same samples.

    python benchmarks/ablation_losses.py [--seeds 3] [--processes 2] [--samples 2000]

The quickstart's model, from the same initial weights: on random micro-batches of four samples, each
padded to the longest of them, and on the product's balanced packs, planned for two data-parallel
ranks. Both train the same samples in as many steps, each run in one process with one thread, and
the loss on held-out samples is taken at even distances. How a model is split and what it
recomputes changes no loss, so that both are trained as one stage.

Prints whether the last losses, mean over seeds, differ by no more than one system's over its seeds.
Takes some five minutes on two cores.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from ablation_padding import padded_to_longest
from ablation_variants import REPOSITORY, deal_in_turn, fours, longest_tokens
from quality import CAPS, MODEL, OPTIMIZATION, digits_lengths, make_digits_dataset
from rich.console import Console
from rich.table import Table

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.data import DataOptions, PackDataset, load_batches
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.inputs.validation_packs import pack_validation
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.train import Trainer, build_trainer, train_step
from megatron.vlm.step.validation import Validation, validate
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.steps.pack_settings import PackSettings

RANKS = 2
"""That the balanced steps are planned for."""
PACKS_PER_STEP = 8
"""Some 50 samples."""
EPOCHS = 3
POINTS = 4
"""Held-out losses of a run, the last at its end."""


class System(StrEnum):
    """What is trained on."""

    COMMON = "common practice"
    FULL = "full system"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A finished run."""

    system: System
    seed: int
    steps: int
    samples: tuple[int, ...]
    """Seen at each point."""
    losses: tuple[float, ...]
    """Held out, at each point."""


def balanced_plan(lengths: Lengths, seed: int) -> tuple[Plan, ScheduledPacks]:
    """For one process, with the steps that several ranks would train."""
    job = JobSpec(
        model=load_model(MODEL),
        cluster=load_cluster("laptop-cpu"),
        parallel=Parallel(pipeline=1, data=RANKS),
        precision="fp32",
    )
    data = SampleData(
        settings=PackSettings(epochs=EPOCHS, seed=seed),
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=PACKS_PER_STEP,
    ).drawn(job)
    alone = make_plan(PlanRequest(job=job.sized(Parallel(pipeline=1)), data=data))
    assert alone.data is not None
    return alone.plan, alone.data[0]


def common_packs(lengths: Lengths, like: ScheduledPacks, seed: int) -> ScheduledPacks:
    """Random micro-batches of four, in as many steps of every epoch as other packs have."""
    first_packs = np.flatnonzero(np.diff(like.step, prepend=-1))
    epoch_of_step = like.epoch[first_packs]
    drawn = [
        fours(samples)
        for epoch, steps in enumerate(np.bincount(epoch_of_step).tolist())
        for samples in np.array_split(
            np.random.default_rng([seed, epoch]).permutation(len(lengths)), steps
        )
    ]
    packs = deal_in_turn(drawn, lengths, dp=1)
    return replace(packs, epoch=epoch_of_step[packs.step])


def run(digits: Path, lengths: Lengths, system: System, seed: int) -> Curve:
    """Train and validate in this process."""
    torch.set_num_threads(1)
    plan, packs = balanced_plan(lengths, seed)
    if system is System.COMMON:
        packs = common_packs(lengths, packs, seed)
    launch = Launch(rank=0, world_size=1, local_rank=0)
    links = initialize_distributed(launch, plan.parallel, seed)
    trainer = build_trainer(plan, links, OPTIMIZATION, steps=packs.steps, seed=seed)
    tokenizer = open_tokenizer(digits / "tokenizer.model")
    training, heldout = (
        SampleReader(Annotations.open(digits / split / "meta.json"), tokenizer, plan.model)
        for split in ("train", "heldout")
    )
    dataset = PackDataset(training, packs, lengths, np.arange(len(packs)), plan.stages[0])
    loaded: Iterable[MicroBatch] = load_batches(dataset, num_workers=0, device=current_device())
    tokens = packs.tokens
    if system is System.COMMON:
        loaded = map(padded_to_longest, loaded)
        tokens = longest_tokens(packs.packs, lengths) * np.diff(packs.packs.offsets)
    points = list(trained(trainer, iter(loaded), packs, tokens, heldout_packs(heldout, plan)))
    shut_down_distributed()
    samples, losses = zip(*points, strict=True)
    return Curve(system=system, seed=seed, steps=packs.steps, samples=samples, losses=losses)


def heldout_packs(reader: SampleReader, plan: Plan) -> Validation:
    """All held-out samples, packed alike for every run."""
    packs = pack_validation(reader, len(reader.annotations), Level(caps=CAPS), data_parallel=1)
    dataset = packs.dataset(reader, plan.stages[0], rank=0, options=DataOptions())
    return Validation(
        batches=lambda: MicroBatchStream(
            batches=load_batches(dataset, num_workers=0, device=current_device()),
            shapes=packs.shapes(rank=0),
        )
    )


def trained(
    trainer: Trainer,
    batches: Iterator[MicroBatch],
    packs: ScheduledPacks,
    tokens: np.ndarray,
    heldout: Validation,
) -> Iterator[tuple[int, float]]:
    """(samples seen, held-out loss) at the points of a run, as it gets there.

    Args:
        tokens: [packs], with padding.
    """
    ends = np.linspace(0, packs.steps, POINTS + 1).round().astype(int)
    samples = np.diff(packs.packs.offsets)
    padded = replace(packs, tokens=tokens)
    for start, end in pairwise(ends.tolist()):
        for step in range(start, end):
            shapes = MicroBatchShape.of_rows(padded, np.flatnonzero(packs.step == step))
            train_step(trainer, MicroBatchStream(batches=batches, shapes=shapes))
        yield int(samples[packs.step < end].sum()), validate(trainer, heldout, end).loss


def run_all(digits: Path, lengths: Lengths, seeds: int, processes: int) -> list[Curve]:
    """All runs, several side by side, each in a process of its own."""
    curves = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = [
            pool.submit(run, digits, lengths, system, seed)
            for seed in range(seeds)
            for system in System
        ]
        for job in as_completed(jobs):
            curves.append(job.result())
            print(described(curves[-1]), flush=True)
    return curves


def described(curve: Curve) -> str:
    losses = ", ".join(f"{loss:.4f}" for loss in curve.losses)
    return f"{curve.system}, seed {curve.seed}: {curve.steps} steps, held-out loss {losses}"


def table_of(curves: Sequence[Curve]) -> Table:
    seeds = len({curve.seed for curve in curves})
    table = Table(
        title=f"Held-out loss, mean and spread (max - min) over {seeds} seeds", title_justify="left"
    )
    for name in ("samples seen", *System, "difference", "of each seed"):
        table.add_column(name, justify="right")
    for point in range(POINTS):
        own = [losses_at(curves, system, point) for system in System]
        seen = [
            statistics.mean(curve.samples[point] for curve in curves if curve.system is system)
            for system in System
        ]
        table.add_row(
            " / ".join(f"{samples:,.0f}" for samples in seen),
            *(f"{statistics.mean(losses):.4f} ({spread(losses):.4f})" for losses in own),
            f"{statistics.mean(differences(curves, point)):+.4f}",
            " ".join(f"{gap:+.4f}" for gap in differences(curves, point)),
        )
    return table


def losses_at(curves: Sequence[Curve], system: System, point: int) -> list[float]:
    """Of every seed, in their order."""
    own = sorted(
        (curve for curve in curves if curve.system is system), key=lambda curve: curve.seed
    )
    return [curve.losses[point] for curve in own]


def spread(losses: Sequence[float]) -> float:
    return max(losses) - min(losses)


def differences(curves: Sequence[Curve], point: int) -> list[float]:
    """Loss of the full system, less that of the common practice, of every seed."""
    common, full = (losses_at(curves, system, point) for system in System)
    return [one - other for one, other in zip(full, common, strict=True)]


def verdict(curves: Sequence[Curve]) -> str:
    """Of the last point; seeds are paired, as both systems begin with the same weights."""
    gaps = differences(curves, -1)
    gap, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    allowed = max(spread(losses_at(curves, system, -1)) for system in System)
    holds = "holds" if abs(gap) <= allowed else "fails"
    return (
        f"at the end the full system's loss is {gap:+.4f} above the common practice's (standard "
        f"error of the paired seeds {error:.4f}); that this is within the spread of a system's "
        f"seeds, {allowed:.4f}, {holds}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--samples", type=int, default=2000, help="in an epoch of three")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "ablation_losses")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds must be at least 2, for a spread to compare with")
    digits = given.work / "digits"
    make_digits_dataset(["--output", str(digits), "--samples", str(given.samples)])
    curves = run_all(digits, digits_lengths(digits), given.seeds, given.processes)
    Console(width=110).print(table_of(curves))
    print(verdict(curves))


if __name__ == "__main__":
    main()
