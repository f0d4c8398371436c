"""Processes that train and replay the ablation's plans by turns, so that all meet the same machine.

A pair of processes trains every plan of two stages for real and measures the model's units; a
process for every stage stands in for it. The parent tells them one after another what to do; what
waits computes nothing. So figures of one round are seconds apart.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ablation_variants import Variant

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset, load_batches
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.profiler import OPTIMIZATION, Profiler, peak_activation_bytes
from megatron.vlm.measure.random_batches import ProfileOptions
from megatron.vlm.measure.stage_replay import (
    MicroBatchTimes,
    StageReplayer,
    predict_waits,
    random_rows,
    standing_in,
)
from megatron.vlm.run.gather import gather_stage_records
from megatron.vlm.run.launch import Launch, initialize_distributed
from megatron.vlm.step.clock import Phase, each_ms
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel, pack_features
from omnibal.cost.profile import Profile
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.runlog import StageRecord
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.workload import Workload
from omnibal.steps.shares import shares_of

PAIR = 2
"""Processes that train and profile, and that replay at the same time."""
WARM_UP = 4
"""Micro-batches before a step that counts: after the others' turns the first ones find the caches
cold, as they are in no run of one plan."""
PADDING_TOKEN = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A variant as the workers are given it."""

    plan: Plan
    packs: ScheduledPacks
    lengths: Lengths
    """Padded ones, where micro-batches are padded."""
    steps: np.ndarray
    """Of the run, that are trained or replayed; one in every round."""
    cost: CostModel
    """By which stages wait for each other while they are replayed."""

    def rows(self, step: int) -> np.ndarray:
        """Of all ranks' packs of a step."""
        return np.flatnonzero(self.packs.step == step)

    @property
    def workload(self) -> Workload:
        """Of all ranks' packs of the run."""
        features = pack_features(self.packs.packs, self.lengths, self.cost.features)
        shares = shares_of(self.packs, self.plan.pack_levels)
        return Workload.build(shares, features, self.plan.parallel.data)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedStep:
    """What one rank saw of a real step."""

    step_ms: float
    """Wall clock, from all ranks' common start."""
    times: MicroBatchTimes
    """Recomputation is not told apart: 0."""
    stages: tuple[StageRecord, ...]
    """Of all ranks."""
    logging_ms: float
    """To bring the stages' figures together, and to write them where a log is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """Where the samples of a plan are."""

    meta: Path
    tokenizer: Path
    lengths: Lengths
    """As they were scanned, without padding."""


def padded_to_longest(batch: MicroBatch) -> MicroBatch:
    """Pad every sample to the length of the longest.

    Padding is computed like any token and changes nothing: attention is causal within a sample, and
    no padding carries loss.
    """
    sizes = torch.tensor(batch.segment_tokens)
    longest = max(batch.segment_tokens)
    moved_S = torch.arange(len(sizes)) * longest - (sizes.cumsum(0) - sizes)
    places_S = torch.arange(int(sizes.sum())) + moved_S.repeat_interleave(sizes)
    tokens = len(sizes) * longest
    moved: dict[str, torch.Tensor] = {}
    if batch.token_ids_S is not None:
        ids_S = batch.token_ids_S
        padded_S = ids_S.new_full((tokens,), PADDING_TOKEN)
        moved["token_ids_S"] = padded_S.index_copy(0, places_S.to(ids_S.device), ids_S)
    for name, positions in (
        ("image_positions_M", batch.image_positions_M),
        ("loss_positions_L", batch.loss_positions_L),
        ("answer_positions_A", batch.answer_positions_A),
    ):
        if positions is not None:
            moved[name] = places_S.to(positions.device)[positions]
    return replace(batch, tokens=tokens, segment_tokens=(longest,) * len(sizes), **moved)


class _PaddedDataset(torch.utils.data.Dataset):
    """Micro-batches padded to their longest sample where they are loaded."""

    def __init__(self, dataset: PackDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, item: int) -> MicroBatch | UserError:
        found = self._dataset[item]
        return found if isinstance(found, UserError) else padded_to_longest(found)


class TrainWorker:
    """A rank of the pair; every method is called on both."""

    def __init__(
        self,
        rank: int,
        meeting: Path,
        profiled: tuple[JobSpec, ProfileOptions],
        planned: Mapping[Variant, Planned],
        data: TrainingData | None,
    ) -> None:
        torch.set_num_threads(1)
        launch = Launch(rank=rank, world_size=PAIR, local_rank=rank)
        links = initialize_distributed(
            launch, Parallel(pipeline=PAIR), seed=0, init_method=f"file://{meeting}"
        )
        job, options = profiled
        self._profiler = Profiler(job, links, options)
        self._rounds: list[Any] = []
        self._planned = planned
        self._trainers = {
            variant: build_trainer(one.plan, links, OPTIMIZATION, steps=len(one.steps), seed=0)
            for variant, one in planned.items()
        }
        self._datasets = {
            variant: _dataset(one, data, rank)
            for variant, one in planned.items()
            if data is not None
        }
        self._loaded: list[MicroBatch] = []

    def profile(self) -> None:
        """A round of the profiler, after one that warms up."""
        self._profiler.round()
        self._rounds.append(self._profiler.round())

    def finished_profile(self) -> Profile:
        """What all rounds say together."""
        return self._profiler.result(self._rounds)

    def load(self, variant: Variant, number: int) -> None:
        """Read the micro-batches of a round's step, so that nothing else is done during it."""
        one, dataset = self._planned[variant], self._datasets[variant]
        sizes = [len(one.rows(step)) for step in one.steps[: number + 1]]
        first = sum(sizes[:-1])
        self._loaded = [_read(dataset[item]) for item in range(first, first + sizes[-1])]

    def train(self, variant: Variant, step: int) -> TrainedStep:
        """A real step on what is loaded, warmed up."""
        train_step(self._trainers[variant], MicroBatchStream.of(self._loaded[:WARM_UP]))
        return self._train(variant, step, iter(self._loaded))

    def train_as_usual(self, variant: Variant, count: int, log: Path) -> list[TrainedStep]:
        """The first steps one after another, read ahead meanwhile and logged."""
        batches = load_batches(self._datasets[variant], 0, current_device())
        with closing(batches):
            steps = self._planned[variant].steps[:count].tolist()
            return [self._train(variant, step, batches, log) for step in steps]

    def _train(
        self,
        variant: Variant,
        step: int,
        batches: Iterator[MicroBatch],
        log: Path | None = None,
    ) -> TrainedStep:
        one, trainer = self._planned[variant], self._trainers[variant]
        dist.barrier()
        begun = time.perf_counter()
        shapes = MicroBatchShape.of_rows(one.packs, one.rows(step))
        result = train_step(trainer, MicroBatchStream(batches=batches, shapes=shapes))
        if has_cuda():
            torch.cuda.synchronize()
        ended = time.perf_counter()
        records = gather_stage_records(trainer.links, result.phases_ms)
        if log is not None and trainer.links.is_first:
            with log.open("a") as lines:
                lines.write("".join(record.model_dump_json() + "\n" for record in records))
        logged = time.perf_counter()
        forward_ms = np.array(each_ms(result.intervals, Phase.FORWARD))
        return TrainedStep(
            step_ms=(ended - begun) * 1e3,
            times=MicroBatchTimes(
                forward_ms=forward_ms,
                backward_ms=np.array(each_ms(result.intervals, Phase.BACKWARD)),
                weight_ms=np.zeros_like(forward_ms),
                recompute_ms=np.zeros_like(forward_ms),
            ),
            stages=records,
            logging_ms=(logged - ended) * 1e3,
        )

    def activation_bytes(self, variant: Variant, step: int) -> int:
        """What this rank's stage needs at most in a real step of random content."""
        one, trainer = self._planned[variant], self._trainers[variant]
        load = random_rows(one.plan, trainer.links.rank, one.packs, one.lengths)
        rows = one.rows(step)
        stream = MicroBatchStream(
            batches=iter(load(rows)), shapes=MicroBatchShape.of_rows(one.packs, rows)
        )
        run = partial(train_step, trainer, stream)
        return peak_activation_bytes(trainer, run)


def _read(found: MicroBatch | UserError) -> MicroBatch:
    if isinstance(found, UserError):
        raise found
    return found.to(current_device())


def _dataset(one: Planned, data: TrainingData, stage: int) -> torch.utils.data.Dataset:
    """The stage's micro-batches of all steps in order."""
    tokenizer = open_tokenizer(data.tokenizer)
    reader = SampleReader(Annotations.open(data.meta), tokenizer, one.plan.model)
    rows = np.concatenate([one.rows(step) for step in one.steps])
    unpadded = replace(one.packs, tokens=one.packs.packs.sums(data.lengths.tokens))
    dataset = PackDataset(reader, unpadded, data.lengths, rows, one.plan.stages[stage])
    is_padded = not np.array_equal(one.lengths.tokens, data.lengths.tokens)
    return _PaddedDataset(dataset) if is_padded else dataset


class ReplayWorker:
    """Stands in for one stage of all plans."""

    def __init__(self, stage: int, planned: Mapping[Variant, Planned]) -> None:
        torch.set_num_threads(1)
        parallel = next(iter(planned.values())).plan.parallel
        self._standing_in = ExitStack()  # for as long as the process lives
        links = self._standing_in.enter_context(standing_in(parallel, stage))
        self._planned, self._stage = planned, stage
        self._replayers = {
            variant: StageReplayer(one.plan, links) for variant, one in planned.items()
        }
        self._workloads = {variant: one.workload for variant, one in planned.items()}
        self._load = {
            variant: random_rows(one.plan, stage, one.packs, one.lengths)
            for variant, one in planned.items()
        }

    def replay(self, variant: Variant, step: int) -> MicroBatchTimes:
        """A step of all ranks, one after another, warmed up."""
        one = self._planned[variant]
        rows = one.rows(step)
        self._replayers[variant].step(self._load[variant](rows[:WARM_UP]))
        ranks = [rows[one.packs.dp_rank[rows] == rank] for rank in range(one.plan.parallel.data)]
        times = [self._replay(variant, own) for own in ranks]
        return MicroBatchTimes.combined(times, np.concatenate)

    def _replay(self, variant: Variant, rows: np.ndarray) -> MicroBatchTimes:
        one, own = self._planned[variant], self._workloads[variant].rows(rows)
        waits = predict_waits(one.plan, self._stage, one.cost, own)
        return self._replayers[variant].step(self._load[variant](rows), waits)

    def update_ms(self, variant: Variant) -> float:
        return self._replayers[variant].update_ms()

    def memory_bytes(self, variant: Variant, rows: np.ndarray) -> tuple[int, int]:
        """State, and activations of one rank's step at their peak."""
        replayer = self._replayers[variant]
        return replayer.state_bytes, replayer.activation_bytes(self._load[variant](rows))


class Worker:
    """A process that makes an object and calls its methods as it is told."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, method: str, *arguments: object) -> None:
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """What came of it; blocks.

        Raises:
            RuntimeError: it failed there; the message holds the traceback.
        """
        result, failure = self._connection.recv()
        if failure is not None:
            raise RuntimeError(failure)
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def ask(workers: Sequence[Worker], method: str, *arguments: object) -> list[Any]:
    """Have all of them call a method at the same time."""
    for worker in workers:
        worker.tell(method, *arguments)
    return [worker.answer() for worker in workers]


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    try:
        made = make()
        connection.send((None, None))
        while True:
            method, arguments = connection.recv()
            connection.send((vars(type(made))[method](made, *arguments), None))
    except EOFError:
        return
    except BaseException:
        connection.send((None, traceback.format_exc()))


class Workers:
    """The pair that trains and profiles, and a process for each stage to replay.

    Args:
        data: None where nothing is trained for real.
    """

    def __init__(
        self,
        profiled: tuple[JobSpec, ProfileOptions],
        planned: Mapping[Variant, Planned],
        data: TrainingData | None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = Path(self._folder.name) / "meeting"
        trained = planned if data is not None else {}
        self.pair = [
            Worker(partial(TrainWorker, rank, meeting, profiled, trained, data))
            for rank in range(PAIR)
        ]
        stages = next(iter(planned.values())).plan.parallel.pipeline
        self.stages = [Worker(partial(ReplayWorker, stage, planned)) for stage in range(stages)]
        for worker in (*self.pair, *self.stages):
            worker.answer()

    def replay(self, method: str, *arguments: object) -> list[Any]:
        """Ask the stages, as many at a time as there are cores; answers in stage order."""
        answers = []
        for first in range(0, len(self.stages), PAIR):
            answers += ask(self.stages[first : first + PAIR], method, *arguments)
        return answers

    def end(self) -> None:
        for worker in (*self.pair, *self.stages):
            worker.end()
        self._folder.cleanup()
