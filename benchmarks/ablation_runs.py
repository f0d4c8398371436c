"""Worker processes that train and replay the ablation's plans in alternation.

A pair of processes trains all plans of two stages and profiles the model's units; one process per
stage replays. The parent calls them in turn, and waiting workers do not compute: all plans of a
round meet the machine at the same speed, seconds apart.
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
    act_as_stage,
    predict_waits,
    random_rows,
)
from megatron.vlm.run.gather import gather_stage_records
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, open_store
from megatron.vlm.step.clock import Phase, phase_times_ms
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.cost.model import CostModel
from omnibal.cost.profile import Profile
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.runlog import StageRecord
from omnibal.model.parallel import Parallel
from omnibal.packing.features import pack_features
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.pipeline.workload import Workload

PAIR = 2  # processes that train and profile; also the number of concurrent replays
# Micro-batches before a timed step: caches are cold after another plan's turn, and would not be in
# a run of one plan.
WARM_UP = 4
PADDING_TOKEN = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A variant's plan and steps, for the workers."""

    plan: Plan
    packs: ScheduledPacks
    lengths: Lengths  # with padding, if micro-batches are padded
    steps: np.ndarray  # to train or replay, one per round
    cost: CostModel  # predicts the waits between stages during replays

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of a step's packs, of all ranks."""
        return np.flatnonzero(self.packs.step == step)

    @property
    def workload(self) -> Workload:
        """Workload of all packs of the run."""
        features = pack_features(self.packs.packs, self.lengths, self.cost.features)
        shares = shares_of(self.packs, self.plan.pack_levels)
        return Workload.build(shares, features, self.plan.parallel.data)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedStep:
    """Times of a trained step on one rank."""

    step_ms: float  # wall clock from the common start
    times: MicroBatchTimes  # recomputation is part of the backward
    stages: tuple[StageRecord, ...]  # of all ranks
    logging_ms: float  # gathering the stages' records, and writing them if there is a log


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """Files of a plan's samples, and their scanned lengths without padding."""

    meta: Path
    tokenizer: Path
    lengths: Lengths


def padded_to_longest(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch with every sample padded to the longest."""
    # Padding is behind a sample's tokens and has no loss, so results do not change: attention is
    # causal within a sample.
    sizes = torch.tensor(batch.segment_tokens)
    longest = max(batch.segment_tokens)
    shift_B = torch.arange(len(sizes)) * longest - (sizes.cumsum(0) - sizes)  # by sample
    places_S = torch.arange(int(sizes.sum())) + shift_B.repeat_interleave(sizes)  # by token
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


class _PaddedDataset:
    """Dataset of micro-batches padded to their longest sample."""

    def __init__(self, dataset: PackDataset) -> None:
        self._dataset = dataset

    def keys(self) -> range:
        return self._dataset.keys()

    def __getitem__(self, item: int) -> MicroBatch:
        return padded_to_longest(self._dataset[item])


class TrainWorker:
    """A rank of the pair. Every method is collective."""

    def __init__(
        self,
        rank: int,
        meeting: Path,
        profiled: tuple[JobSpec, ProfileOptions],
        planned: Mapping[Variant, Planned],
        data: TrainingData | None,
    ) -> None:
        torch.set_num_threads(1)
        launch = RankLaunch(rank=rank, world_size=PAIR, local_rank=rank)
        store = open_store(launch, f"file://{meeting}")
        links = initialize_distributed(launch, Parallel(pipeline=PAIR), seed=0, store=store)
        job, options = profiled
        self._profiler = Profiler(job, links, options)
        self._rounds: list[Any] = []
        self._planned = planned
        self._trainers = {
            variant: build_trainer(run.plan, links, OPTIMIZATION, steps=len(run.steps), seed=0)
            for variant, run in planned.items()
        }
        self._datasets = {
            variant: _make_dataset(run, data, rank)
            for variant, run in planned.items()
            if data is not None
        }
        self._loaded: list[MicroBatch] = []

    def profile(self) -> None:
        """Run the profiler twice, the first time to warm up."""
        self._profiler.round()
        self._rounds.append(self._profiler.round())

    def finished_profile(self) -> Profile:
        """Return the profile of all rounds."""
        return self._profiler.result(self._rounds)

    def load(self, variant: Variant, number: int) -> None:
        """Read the micro-batches of a round's step before it is timed."""
        run, dataset = self._planned[variant], self._datasets[variant]
        sizes = [len(run.rows(step)) for step in run.steps[: number + 1]]
        first = sum(sizes[:-1])
        items, device = range(first, first + sizes[-1]), current_device()
        self._loaded = [dataset[item].to(device) for item in items]

    def train(self, variant: Variant, step: int) -> TrainedStep:
        """Train a step on the loaded micro-batches, after a warm-up."""
        train_step(self._trainers[variant], MicroBatchStream.of(self._loaded[:WARM_UP]))
        return self._train(variant, step, iter(self._loaded))

    def train_row(self, variant: Variant, count: int, log: Path) -> list[TrainedStep]:
        """Train the first steps in a row, with samples read during steps and a log."""
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
        run, trainer = self._planned[variant], self._trainers[variant]
        dist.barrier()
        start = time.perf_counter()
        shapes = MicroBatchShape.of_rows(run.packs, run.rows(step))
        result = train_step(trainer, MicroBatchStream(batches=batches, shapes=shapes))
        if has_cuda():
            torch.cuda.synchronize()
        end = time.perf_counter()
        records = gather_stage_records(trainer.links, result.phases_ms)
        if log is not None and trainer.links.is_first:
            with log.open("a") as lines:
                lines.write("".join(record.model_dump_json() + "\n" for record in records))
        end_of_log = time.perf_counter()
        forward_ms = np.array(phase_times_ms(result.intervals, Phase.FORWARD))
        return TrainedStep(
            step_ms=(end - start) * 1e3,
            times=MicroBatchTimes(
                forward_ms=forward_ms,
                backward_ms=np.array(phase_times_ms(result.intervals, Phase.BACKWARD)),
                weight_ms=np.zeros_like(forward_ms),
                recompute_ms=np.zeros_like(forward_ms),
            ),
            stages=records,
            logging_ms=(end_of_log - end) * 1e3,
        )

    def activation_bytes(self, variant: Variant, step: int) -> int:
        """Return this stage's peak of activations in a step of random content."""
        run, trainer = self._planned[variant], self._trainers[variant]
        load = random_rows(run.plan, trainer.links.rank, run.packs, run.lengths)
        rows = run.rows(step)
        stream = MicroBatchStream(
            batches=iter(load(rows)), shapes=MicroBatchShape.of_rows(run.packs, rows)
        )
        return peak_activation_bytes(trainer, partial(train_step, trainer, stream))


def _make_dataset(run: Planned, data: TrainingData, stage: int) -> PackDataset | _PaddedDataset:
    """Return a stage's micro-batches of all steps, in order."""
    tokenizer = open_tokenizer(data.tokenizer)
    reader = SampleReader(Annotations.open(data.meta), tokenizer, run.plan.model)
    rows = np.concatenate([run.rows(step) for step in run.steps])
    # The reader checks token counts: samples are read unpadded, and padded afterwards.
    unpadded = replace(run.packs, tokens=run.packs.packs.sums(data.lengths.tokens))
    dataset = PackDataset(reader, unpadded, data.lengths, rows, run.plan.stages[stage])
    is_padded = not np.array_equal(run.lengths.tokens, data.lengths.tokens)
    return _PaddedDataset(dataset) if is_padded else dataset


class ReplayWorker:
    """Replay of one stage of all plans."""

    def __init__(self, stage: int, planned: Mapping[Variant, Planned]) -> None:
        torch.set_num_threads(1)
        parallel = next(iter(planned.values())).plan.parallel
        self._standing_in = ExitStack()  # open until the process ends
        links = self._standing_in.enter_context(act_as_stage(parallel, stage))
        self._planned, self._stage = planned, stage
        self._replayers = {
            variant: StageReplayer(run.plan, links) for variant, run in planned.items()
        }
        self._workloads = {variant: run.workload for variant, run in planned.items()}
        self._load = {
            variant: random_rows(run.plan, stage, run.packs, run.lengths)
            for variant, run in planned.items()
        }

    def replay(self, variant: Variant, step: int) -> MicroBatchTimes:
        """Replay a step of every data-parallel rank in turn, after a warm-up."""
        run = self._planned[variant]
        rows, load, times = run.rows(step), self._load[variant], []
        self._replayers[variant].step(load(rows[:WARM_UP]))
        for rank in range(run.plan.parallel.data):
            of_rank = rows[run.packs.dp_rank[rows] == rank]
            workload = self._workloads[variant].rows(of_rank)
            waits = predict_waits(run.plan, self._stage, run.cost, workload)
            times.append(self._replayers[variant].step(load(of_rank), waits))
        return MicroBatchTimes.combine(times, np.concatenate)

    def update_ms(self, variant: Variant) -> float:
        return self._replayers[variant].update_ms()

    def memory_bytes(self, variant: Variant, rows: np.ndarray) -> tuple[int, int]:
        """Return bytes of state, and the peak of activations in a rank's step."""
        replayer = self._replayers[variant]
        return replayer.state_bytes, replayer.activation_bytes(self._load[variant](rows))


class Worker:
    """Process that serves an object's methods to its parent."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: object) -> None:
        """Start a method; `receive` returns its result."""
        self._connection.send((method, arguments))

    def receive(self) -> Any:
        """Wait for the result of the last call.

        Raises:
            RuntimeError: it failed; the message is the worker's traceback.
        """
        result, failure = self._connection.recv()
        if failure is not None:
            raise RuntimeError(failure)
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def ask(workers: Sequence[Worker], method: str, *arguments: object) -> list[Any]:
    """Call a method of all workers at the same time, and return the results."""
    for worker in workers:
        worker.call(method, *arguments)
    return [worker.receive() for worker in workers]


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    try:
        served = make()
        connection.send((None, None))
        while True:
            method, arguments = connection.recv()
            connection.send((vars(type(served))[method](served, *arguments), None))
    except EOFError:
        return
    except BaseException:
        connection.send((None, traceback.format_exc()))


class Workers:
    """The pair that trains and profiles, and a process per stage that replays.

    Args:
        data: None without training.
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
            worker.receive()

    def replay(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of all stages, `PAIR` at a time, and return the results by stage."""
        results = []
        for first in range(0, len(self.stages), PAIR):
            results += ask(self.stages[first : first + PAIR], method, *arguments)
        return results

    def end(self) -> None:
        for worker in (*self.pair, *self.stages):
            worker.end()
        self._folder.cleanup()
