"""Costs measured between the steps of a benchmark, by as many processes as train.

Megatron-core has one layout of ranks in a process, and a profile is of one device alone: so each
training process has another beside it that profiles, on the same part of the cores, while the first
one waits. Both meet the machine at the same speeds.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import numpy as np
from levels import mean_rates, one_node
from rich.console import Console

from megatron.vlm.measure.profiler import ProfileOptions, Profiler
from megatron.vlm.measure.rates import mean_ms, measure_rates
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.cost.profile import Profile
from omnibal.job.job import JobSpec
from omnibal.model.config import ModelConfig
from omnibal.model.parallel import Parallel

_PATIENCE_S = 300
"""Longest wait for the other process: it has died then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Whose turn it is, of the two processes of every rank."""

    to_profile: Sequence[Semaphore]
    to_train: Sequence[Semaphore]

    @classmethod
    def of(cls, ranks: int) -> "Turns":
        """The turns of so many ranks, before their processes are forked."""
        context = multiprocessing.get_context("fork")
        each = [[context.Semaphore(0) for _ in range(ranks)] for _ in range(2)]
        return cls(to_profile=each[0], to_train=each[1])

    def profile(self, rank: int) -> None:
        """Let the rank's other process profile, and wait until it has."""
        self.to_profile[rank].release()
        assert self.to_train[rank].acquire(timeout=_PATIENCE_S), "the profiling process is gone"

    def wait_to_profile(self, rank: int) -> None:
        """Wait until it is time to profile."""
        assert self.to_profile[rank].acquire(timeout=_PATIENCE_S), "the training process is gone"

    def profiled(self, rank: int) -> None:
        """Let the rank's training process go on."""
        self.to_train[rank].release()


def profile_rank(
    rank: int,
    turns: Turns,
    rounds: int,
    model: ModelConfig,
    options: ProfileOptions,
    sizes: MeasuredSizes,
    folder: Path,
) -> Profile:
    """Profile a model on this rank, in so many turns; collective over the profiling processes."""
    ranks = len(turns.to_profile)
    launch = Launch(rank=rank, world_size=ranks, local_rank=rank)
    parallel = Parallel(pipeline=ranks)
    store = f"file://{folder / 'profiling'}"
    links = initialize_distributed(launch, parallel, seed=1, init_method=store)
    job = JobSpec(model=model, cluster=one_node(), parallel=Parallel(pipeline=1), precision="fp32")
    turns.wait_to_profile(rank)
    profiler = Profiler(job, links, options)
    turns.profiled(rank)
    profiled, rates, core_shares = [], [], []
    for _ in range(rounds):
        turns.wait_to_profile(rank)
        begun, core_begun = time.perf_counter(), time.process_time()
        profiled.append(profiler.round())
        rates.append(measure_rates("this machine", "fp32", sizes, Console(quiet=True)))
        core_share = (time.process_time() - core_begun) / (time.perf_counter() - begun)
        core_shares.append(mean_ms([core_share]))
        turns.profiled(rank)
    quiet = quiet_rounds(core_shares)
    profile = profiler.result([profiled[number] for number in quiet])
    shut_down_distributed()
    return profile.model_copy(update={"rates": mean_rates([rates[number] for number in quiet])})


def quiet_rounds(core_shares: Sequence[float]) -> list[int]:
    """The half of all rounds in which processes got most of the cores: other programs took least.

    Args:
        core_shares: core time over time by the clock, of every round.
    """
    most_first = np.argsort(-np.array(core_shares), kind="stable")
    return sorted(most_first[: -(-len(core_shares) // 2)].tolist())


def core_shares(
    core_ms: Sequence[Mapping[str, Sequence[float]]],
    clock_ms: Sequence[Mapping[str, Sequence[float]]],
) -> list[float]:
    """Core time over time by the clock of every round, over all ranks and ways.

    Args:
        core_ms: of each rank, by way, of every round; `clock_ms` likewise.
    """
    core, clock = (
        np.sum([list(one.values()) for one in each], axis=(0, 1)) for each in (core_ms, clock_ms)
    )
    shares: list[float] = (core / clock).tolist()
    return shares
