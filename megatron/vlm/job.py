"""One call of pretrain_vlm.py, its command line read: inputs checked, parts put together."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron.vlm.backend import current_device
from megatron.vlm.batch import MicroBatchStream
from megatron.vlm.checkpoint import CheckpointWriter, load_checkpoint, load_weights
from megatron.vlm.checkpoint_files import latest_step
from megatron.vlm.data import DataOptions, PackDataset, SampleReader, load_batches
from megatron.vlm.evaluate import EvaluationOptions, evaluate
from megatron.vlm.health import RunHealth
from megatron.vlm.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.loop import RunData, RunOptions, RunOutcome, RunOutputs, TrainingLoop, own_rows
from megatron.vlm.metrics import MetricsSink, TensorBoardSink, WandbSink
from megatron.vlm.stop import StopSignal
from megatron.vlm.train import OptimizationOptions, Trainer, build_trainer
from megatron.vlm.validation import Validation
from megatron.vlm.validation_packs import pack_validation
from megatron.vlm.watch import ending_together
from omnibal.check import open_plan, training_obstacles
from omnibal.cost.analytic import model_flops
from omnibal.cost.model import pack_features
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.data.packs import ScheduledPacks, read_packs
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.errors import UserError
from omnibal.plan import LENGTHS_FILE, PACKS_FILE, DataPlan, Plan
from omnibal.runlog import (
    RUN_FILE,
    VALIDATION_FILE,
    RunInfo,
    drop_records,
    write_evaluation,
    write_run_info,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything that is known, and has been checked, before the processes join."""

    plan: Plan
    tokenizer: Tokenizer
    launch: Launch
    lengths: Lengths
    packs: ScheduledPacks
    training_data: Annotations | None
    heldout_data: Annotations | None

    @property
    def data(self) -> DataPlan:
        """What the packs were made from; without it a plan is refused before it becomes a job."""
        assert self.plan.data is not None
        return self.plan.data

    def reader(self, annotations: Annotations | None) -> SampleReader:
        """Samples, which the command line gave, as this job's model takes them."""
        assert annotations is not None
        return SampleReader(annotations, self.tokenizer, self.plan.model)

    def say(self, line: str) -> None:
        """To the user, once for all ranks."""
        if self.launch.rank == 0:
            print(line, flush=True)


def load_plan(directory: Path) -> Plan:
    """Read and check the plan.

    Raises:
        UserError: it does not hold, or cannot be trained.
    """
    plan = open_plan(directory).plan
    obstacles = training_obstacles(plan)
    if obstacles:
        raise UserError(f"{directory}: {'; '.join(obstacles)}")
    return plan


def load_job(arguments: argparse.Namespace, plan: Plan, launch: Launch) -> Job:
    """Read and check the other inputs; every rank finds the same mistakes here.

    Raises:
        UserError: the launch, the data, the tokenizer or the run's directory do not fit the plan.
    """
    launch.check_against(plan.parallel)
    tokenizer = open_tokenizer(arguments.tokenizer_model)
    assert plan.data is not None and plan.data.origin is not None
    origin = plan.data.origin
    check_same_data("the tokenizer", tokenizer.sha256, origin.tokenizer_sha256)
    training_data = heldout_data = None
    if not arguments.skip_train:
        training_data = Annotations.open(arguments.data)
        check_same_data(str(arguments.data), training_data.sha256, origin.data_sha256)
        # Training from other weights is another run than the one that had them.
        _check_no_other_run(arguments.save, None if arguments.finetune else arguments.load)
    if arguments.eval_data is not None:
        heldout_data = Annotations.open(arguments.eval_data)
    return Job(
        plan=plan,
        tokenizer=tokenizer,
        launch=launch,
        lengths=read_lengths([arguments.plan / LENGTHS_FILE]),
        packs=read_packs(arguments.plan / PACKS_FILE),
        training_data=training_data,
        heldout_data=heldout_data,
    )


def _check_no_other_run(save: Path, load: Path | None) -> None:
    step = latest_step(save)
    if step is not None and (load is None or load.resolve() != save.resolve()):
        raise UserError(
            f"{save}: holds a run of {step} steps; resume it with --load {save}, or give another "
            "--save"
        )


def check_same_data(name: str, given: str, planned: str) -> None:
    """Refuse data or a tokenizer that the plan was not made for.

    Args:
        name: of what is given.
        given, planned: their hashes.
    """
    if planned != given:
        raise UserError(
            f"the plan was made for other data: {name} has sha256 {given[:12]}, but the plan's "
            f"lengths were scanned from {planned[:12]}; use what was scanned, or run "
            "`omnibal lengths` and `omnibal plan` on this"
        )


def run_job(job: Job, arguments: argparse.Namespace, store: dist.Store) -> None:
    """Join the processes, then train and evaluate; any rank's error ends the process.

    Args:
        store: through which the ranks have met.
    """
    with ending_together(job.launch, store):
        links = initialize_distributed(job.launch, job.plan.parallel, arguments.seed, store=store)
        trainer = build_trainer(
            job.plan,
            links,
            _optimization_options(arguments),
            steps=job.packs.steps,
            seed=arguments.seed,
        )
        if arguments.skip_train:
            outcome = RunOutcome(load_weights(arguments.load, job.plan, trainer.stage), False)
        else:
            outcome = train_plan(job, trainer, arguments)
        if outcome.stopped:
            job.say(
                f"stopped as asked after step {outcome.steps}; to go on, give the same command "
                f"with --load {arguments.save}"
            )
        elif job.heldout_data is not None:
            evaluate_heldout(job, trainer, arguments, outcome.steps)
        shut_down_distributed()


def train_plan(job: Job, trainer: Trainer, arguments: argparse.Namespace) -> RunOutcome:
    """Train from the start or from --load to the end or to --train-iters."""
    assert job.training_data is not None
    options = asdict(trainer.options) | {
        "seed": arguments.seed,
        "augmented": list(job.training_data.augmented),
        "frozen": list(job.plan.frozen),
    }
    first_step, skipped_steps = _load(job, trainer, arguments, options)
    last_step = min(arguments.train_iters or job.packs.steps, job.packs.steps)
    if first_step >= last_step:
        job.say(f"nothing to train: {first_step} steps are done, and {last_step} are asked for")
        return RunOutcome(first_step, False)
    _check_traced_steps(arguments.profile_steps, last_step)
    validation = _validation(job, trainer, arguments)
    sinks = _open_run(job, arguments, first_step)
    writer = CheckpointWriter(
        arguments.save, job.plan, trainer.stage, trainer.optimizer, trainer.scheduler, options,
        keep_last=arguments.keep_checkpoints, asynchronous=arguments.async_save,
    )  # fmt: skip
    dataset = PackDataset(
        job.reader(job.training_data),
        job.packs,
        job.lengths,
        own_rows(job.packs, first_step, last_step),
        job.plan.stages[trainer.links.rank],
        _data_options(arguments),
    )
    batches = load_batches(dataset, arguments.num_workers, current_device())
    with closing(batches), StopSignal() as stop:
        loop = TrainingLoop(
            trainer,
            RunData(
                scheduled=job.packs,
                batches=batches,
                pack_flops=_pack_flops(job),
                peak_flops_per_s=_peak_flops_per_s(job.plan),
                validation=validation,
            ),
            RunOptions(
                save=arguments.save,
                save_interval=arguments.save_interval,
                last_step=last_step,
                eval_interval=arguments.eval_interval,
                exit_after_failed_saves=arguments.exit_after_failed_saves,
                profile_steps=arguments.profile_steps,
            ),
            writer,
            RunHealth(arguments.max_skipped_steps, skipped_steps),
            RunOutputs(on_line=job.say, sinks=sinks),
            lambda: stop.requested,
        )
        return loop.run(first_step)


def _load(
    job: Job, trainer: Trainer, arguments: argparse.Namespace, options: dict[str, Any]
) -> tuple[int, int]:
    """The steps done before, and how many of them were skipped."""
    if arguments.load is None:
        return 0, 0
    if arguments.finetune:
        steps = load_weights(arguments.load, job.plan, trainer.stage)
        trainer.optimizer.reload_model_params()
        job.say(f"starting from the weights of {arguments.load} after step {steps}")
        return 0, 0
    loaded = load_checkpoint(
        arguments.load, job.plan, trainer.stage, trainer.optimizer, trainer.scheduler, options
    )
    job.say(f"resuming {arguments.load} after step {loaded.step}")
    return loaded.step, loaded.training_state["skipped_steps"]


def _check_traced_steps(steps: range, last_step: int) -> None:
    if steps and steps[-1] >= last_step:
        raise UserError(
            f"--profile-steps: step {steps[-1]} was given, and the run ends with step "
            f"{last_step - 1}; steps count from 0"
        )


def _open_run(job: Job, arguments: argparse.Namespace, first_step: int) -> Sequence[MetricsSink]:
    """On the writing rank, make the run's directory ready for its first step; what was logged of
    steps that are not in the checkpoint goes."""
    if job.launch.rank != 0:
        return ()
    _make_directory(arguments.save)
    sinks: list[MetricsSink] = []
    if arguments.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(arguments.tensorboard_dir, first_step))
    if arguments.wandb_project is not None:
        sinks.append(WandbSink(arguments.wandb_project, arguments.save.name, arguments.save))
    same_run = arguments.load is not None and arguments.load.resolve() == arguments.save.resolve()
    first_logged = first_step if same_run else 0
    drop_records(arguments.save / RUN_FILE, first_logged)
    # A validation counts the steps before it.
    drop_records(arguments.save / VALIDATION_FILE, first_logged + 1)
    info = RunInfo(model=job.plan.model.name, packs_sha256=job.data.packs_sha256)
    write_run_info(info, arguments.save)
    return sinks


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--save {path}: {error.strerror}; give a directory that can be written to"
        ) from error


def _optimization_options(arguments: argparse.Namespace) -> OptimizationOptions:
    names = [field.name for field in fields(OptimizationOptions)]
    return OptimizationOptions(**{name: vars(arguments)[name] for name in names})


def _data_options(arguments: argparse.Namespace) -> DataOptions:
    return DataOptions(
        seed=arguments.seed,
        loss_weighting=arguments.loss_weighting,
        on_bad_sample=arguments.on_bad_sample,
        augment=True,
        drop_path=arguments.drop_path_rate > 0,
    )


def _pack_flops(job: Job) -> np.ndarray:
    flops = model_flops(job.plan.model, job.plan.cluster, job.plan.frozen)
    return pack_features(job.packs.packs, job.lengths) @ flops


def _peak_flops_per_s(plan: Plan) -> float:
    return plan.cluster.tflops(plan.precision) * 1e12 * plan.parallel.world_size


def _validation(job: Job, trainer: Trainer, arguments: argparse.Namespace) -> Validation | None:
    if arguments.eval_interval is None:
        return None
    reader = job.reader(job.heldout_data)
    caps, sizes = job.data.caps, job.plan.parallel
    packs = pack_validation(reader, arguments.eval_samples, caps, sizes.data)
    if packs.left_out:
        job.say(f"validation leaves out {packs.left_out} held-out samples that exceed a cap")
    stage, rank = job.plan.stages[trainer.links.rank], parallel_state.get_data_parallel_rank()
    dataset = packs.dataset(reader, stage, rank, _data_options(arguments))
    shapes, workers = packs.shapes(rank), arguments.num_workers
    return Validation(
        batches=lambda: MicroBatchStream(
            batches=load_batches(dataset, workers, current_device()), shapes=shapes
        )
    )


def evaluate_heldout(job: Job, trainer: Trainer, arguments: argparse.Namespace, step: int) -> None:
    """Answer held-out questions; accuracy by kind goes into evaluation.json."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=job.launch.rank != 0) as progress:
        task = progress.add_task("answering held-out questions", total=None)
        evaluation = evaluate(
            trainer.model,
            trainer.links,
            job.plan,
            job.data.caps,
            job.reader(job.heldout_data),
            step,
            EvaluationOptions(
                samples=arguments.eval_samples, max_new_tokens=arguments.max_new_tokens
            ),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if job.launch.rank == 0:
        _make_directory(arguments.save)
        job.say(f"wrote {write_evaluation(evaluation, arguments.save)}")
