"""A run of tools/replay.py: checks inputs, distributes stages, writes results as they finish.

Processes meet at a store, not in a process group: `act_as_stage` makes a fake group for each stage.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron.vlm.backend import has_cuda
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.profiler import find_device_name
from megatron.vlm.measure.stage_replay import (
    LoadRows,
    StageWork,
    predict_waits,
    random_rows,
    read_rows,
    replay_stage,
)
from megatron.vlm.run.launch import RankLaunch
from megatron.vlm.run.log import progress_of_rank
from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.data.annotations import Annotations
from omnibal.data.chat import text_sha256
from omnibal.data.lengths import Lengths, check_same_data
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.check import model_obstacle, open_plan, precision_obstacle
from omnibal.job.plan import Plan, plan_sha256
from omnibal.job.plan_files import PlanFiles
from omnibal.job.replay import (
    REPLAY_FILES,
    AnyIdentity,
    AnyStageResult,
    ReplayInfo,
    StageFiles,
    StageReplay,
    choose_steps,
    heaviest_rows,
)
from omnibal.model.config import Provider
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.workload import Workload

_STORE_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplayJob:
    """A checked plan, its packs and the source of their content."""

    planned: PlanFiles
    packs: ScheduledPacks
    lengths: Lengths
    reader: SampleReader | None  # None for random content

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def cost(self) -> CostModel:
        return self.planned.job.cost_of_all(self.plan.pack_levels)

    @property
    def workload(self) -> Workload:
        """Return the workload with row i for pack i, without empty micro-batches."""
        whole = self.planned.job.workload(self.packs, self.lengths, self.plan.pack_levels)
        return whole.rows(~whole.is_empty)

    def rows_of(self, stage: int) -> LoadRows:
        if self.reader is None:
            return random_rows(self.plan, stage, self.packs, self.lengths)
        return read_rows(self.plan, stage, self.packs, self.lengths, self.reader)

    def work_of(self, stage: int, info: ReplayInfo) -> StageWork:
        """Return each data-parallel rank's part of the chosen steps, and the heaviest parts."""
        # All micro-batches of a rank's step, so that as many are in flight as in the job.
        rows = np.flatnonzero(np.isin(self.packs.step, info.steps))
        place = self.packs.step[rows] * self.plan.parallel.data + self.packs.dp_rank[rows]
        steps = np.split(rows, np.flatnonzero(np.diff(place)) + 1)
        cost, workload = self.cost, self.workload
        return StageWork(
            steps=tuple(steps),
            waits_ms=tuple(
                predict_waits(self.plan, stage, cost, workload.rows(own)) for own in steps
            ),
            heaviest=heaviest_rows(cost, self.plan, stage, workload),
            repetitions=info.repetitions,
        )


def load_replay(plan_directory: Path, data: Path | None, tokenizer: Path | None) -> ReplayJob:
    """Read a plan and the data to replay it on; raise UserError if it cannot be replayed."""
    planned = open_plan(plan_directory)
    obstacle = model_obstacle(planned.plan.model) or precision_obstacle(planned.plan)
    if obstacle is not None:
        raise UserError(f"{plan_directory}: {obstacle}, so it cannot be replayed")
    if planned.plan.has_shared_packs:
        raise UserError(
            f"{plan_directory}: ranks share packs, and a replay runs one; use --packing-levels 1"
        )
    packs, lengths = planned.steps
    reader = _open_reader(planned.plan, data, tokenizer)
    return ReplayJob(planned=planned, packs=packs, lengths=lengths, reader=reader)


def check_alone(plan: Plan) -> None:
    """Raise UserError if a stage of the plan cannot run alone on a real device."""
    encoders = plan.data_parallel_encoders is not None
    for applies, feature, alternative in (
        (plan.parallel.expert > 1, "expert parallelism", "`omnibal plan --ep 1`"),
        (encoders, "data-parallel encoders", "`omnibal plan --encoder pipeline`"),
        (plan.parallel.sharded > 1, "sharded weights", "parallel.sharded 1"),
    ):
        if applies:
            raise UserError(
                f"the plan has {feature}, and a replay runs one rank without the others of its "
                f"exchanges; add --fake-device, which counts them, or give a plan of {alternative}"
            )


def _open_reader(plan: Plan, data: Path | None, tokenizer_path: Path | None) -> SampleReader | None:
    if data is None and tokenizer_path is None:
        return None
    if data is None or tokenizer_path is None:
        raise UserError("give both --data and --tokenizer-model, or neither for random content")
    if plan.data is None or plan.data.origin is None:
        raise UserError(f"--data {data}: the plan names no data; drop --data and --tokenizer-model")
    annotations, tokenizer = Annotations.open(data), open_tokenizer(tokenizer_path)
    check_same_data(
        "the tokenizer", text_sha256(plan.model, tokenizer), plan.data.origin.tokenizer_sha256
    )
    check_same_data(str(data), annotations.sha256, plan.data.origin.data_sha256)
    return SampleReader(annotations, tokenizer, plan.model)


def replay_info(
    job: ReplayJob,
    *,
    steps: int,
    repetitions: int,
    processes: int = 1,
    provider: Provider = "local",
) -> ReplayInfo:
    return ReplayInfo(
        plan_sha256=plan_sha256(job.plan),
        steps=choose_steps(job.packs, steps),
        repetitions=repetitions,
        content="random" if job.reader is None else "data",
        device=find_device_name(),
        processes=processes,
        provider=provider,
    )


def replay_stages(
    job: ReplayJob,
    info: ReplayInfo,
    stages: Sequence[int],
    output: Path,
    launch: RankLaunch,
    store: dist.Store,
) -> None:
    """Replay unfinished stages and write results; see `run_stages`."""
    if has_cuda():
        torch.cuda.set_device(launch.local_rank)
    else:
        torch.set_num_threads(1)  # as training does on CPUs

    def prepare(stage: int) -> StageRun[StageReplay]:
        work = job.work_of(stage, info)
        return work.runs, lambda on_run: replay_stage(
            job.plan, stage, work, job.rows_of(stage), on_run, info.provider
        )

    title = "replaying steps of single ranks"
    run_stages(title, REPLAY_FILES, info, prepare, stages, output, launch, store)


# Number of a stage's runs, and a function that runs them and calls its argument after each run.
StageRun = tuple[int, Callable[[Callable[[], None]], AnyStageResult]]


def run_stages(
    title: str,
    files: StageFiles[AnyIdentity, AnyStageResult],
    info: AnyIdentity,
    prepare: Callable[[int], StageRun[AnyStageResult]],
    stages: Sequence[int],
    output: Path,
    launch: RankLaunch,
    store: dist.Store,
) -> None:
    """Run unfinished stages, dealt out to processes, and write results.

    Rank 0 creates `output` if absent, shows all progress, waits for all processes, and raises a
    UserError of all failures.
    """
    if launch.rank == 0:
        files.open(output, info)
        store.set("output", "open")
    store.wait(["output"])
    files.open(output, info)
    finished = {result.stage for result in files.read_stages(output, max(stages) + 1)}
    # Wait before writing, so that all processes list the same unfinished stages.
    _arrive(store, "read", launch)
    runs = {stage: prepare(stage) for stage in stages if stage not in finished}
    with progress_of_rank(launch.rank) as progress:
        task = progress.add_task(title, total=sum(count for count, _ in runs.values()))

        def on_run(count: int = 1) -> None:
            progress.update(task, completed=store.add("runs", count))

        for stage in list(runs)[launch.rank :: launch.world_size]:
            try:
                files.write(runs[stage][1](on_run), output)
            except UserError as error:
                # Other stages still run. Only text: the error would keep this stage's memory alive.
                store.set(f"failed {stage}", str(error))
        # Rank 0 may serve the store, so it leaves last.
        _arrive(store, "done", launch, waits=launch.rank == 0, meanwhile=lambda: on_run(0))
    if launch.rank == 0:
        failed = [f"failed {stage}" for stage in runs if store.check([f"failed {stage}"])]
        if failed:
            raise UserError("; ".join(store.get(key).decode() for key in failed))


def _arrive(
    store: dist.Store,
    name: str,
    launch: RankLaunch,
    *,
    waits: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Count this process at `name`; wait for all if `waits` (the store's barrier times out)."""
    store.add(name, 1)
    while waits and store.add(name, 0) < launch.world_size:
        meanwhile()
        time.sleep(_STORE_POLL_S)
