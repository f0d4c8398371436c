"""A run of pretrain_vlm.py with its command line parsed: checks of its inputs, then training."""

import gc
import json
import logging
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.checkpoint.run_folders import name_newest
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint, load_weights
from megatron.vlm.inputs.batch import MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.data import PackDataset, load_batches
from megatron.vlm.inputs.encoder_data import EncodingDataset
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.inputs.validation_packs import pack_validation
from megatron.vlm.model.providers import check_provider_of
from megatron.vlm.run.arguments import (
    ADAPTER_LEARNING_RATE,
    LEARNING_RATE,
    VISION_SHARE,
    RunArguments,
)
from megatron.vlm.run.health import RunHealth
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from megatron.vlm.run.log import progress_of_rank
from megatron.vlm.run.loop import RunData, RunOutcome, TrainingLoop, encoder_shares
from megatron.vlm.run.metrics import MetricsSink, TensorBoardSink, WandbSink
from megatron.vlm.run.plans import MadePlan, newest_plan, plan_again
from megatron.vlm.run.stop import StopSignal
from megatron.vlm.run.watch import ending_together
from megatron.vlm.step.evaluate import Validation, evaluate_answers
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer
from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import UserError
from omnibal.base.folder_lock import lock_folder
from omnibal.cost.analytic import model_flops
from omnibal.data.annotations import Annotations
from omnibal.data.chat import text_sha256
from omnibal.data.data_index import DataIndex
from omnibal.data.lengths import Lengths, check_same_data
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.job.check import open_plan, open_portion, training_obstacles
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, Plan, plan_sha256, read_plan
from omnibal.job.plan_files import PlanFiles, hash_steps
from omnibal.job.runlog import (
    RUN_FILE,
    RUN_INFO_FILE,
    VALIDATION_FILE,
    RunInfo,
    drop_records,
    latest_step,
    read_run_info,
    write_evaluation,
    write_run_info,
)
from omnibal.model.limits import Caps
from omnibal.model.units import feature_names
from omnibal.packing.features import pack_features
from omnibal.packing.packs import Packs
from omnibal.pipeline.loader_time import too_few_loaders
from omnibal.pipeline.unit_runs import encoders_stage

# Share of the step time that a new plan must save to be worth a reload. Predictions are accurate to
# some percent (docs/results.md), differences between plans of one job to less.
MIN_REPLAN_GAIN = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRun:
    """A run with checked arguments, plan and data, before processes join."""

    arguments: RunArguments
    planned: PlanFiles
    tokenizer: Tokenizer
    launch: RankLaunch
    training_data: Annotations | None  # training samples, or None if the run only evaluates
    heldout_data: Annotations | None  # held-out samples, or None without evaluation

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def directory(self) -> Path:
        assert self.planned.directory is not None
        return self.planned.directory

    @property
    def last_step(self) -> int:
        """Return the number of steps after which the run ends."""
        return min(self.arguments.train_iters or self.data.steps, self.data.steps)

    @property
    def data(self) -> DataPlan:
        assert self.plan.data is not None, "open_trainable refuses plans without data"
        return self.plan.data

    def make_reader(self, annotations: Annotations | None) -> SampleReader:
        assert annotations is not None
        return SampleReader(annotations, self.tokenizer, self.plan.model)


def open_trainable(directory: Path) -> PlanFiles:
    """Return the files of a plan; raise UserError if it cannot be trained."""
    planned = open_plan(directory, to_train=True)
    obstacles = training_obstacles(planned.plan)
    if obstacles:
        raise UserError(f"{directory}: {'; '.join(obstacles)}")
    return planned


def plan_to_train(given: Path, arguments: RunArguments, launch: RankLaunch) -> Path:
    """Return the plan directory to train: `given`, or the newest of a continued or elastic run."""
    is_continued = arguments.continues_run or arguments.checkpoints.elastic
    if arguments.finetune or not is_continued:
        return given
    step = latest_step(arguments.save) or 0
    newest = newest_plan(given, arguments.save, step, launch.world_size)
    if newest.directory != given:
        _log.info(f"going on with {newest.directory}, made after step {newest.step}")
    return newest.directory


def resume_elastic(arguments: RunArguments) -> RunArguments:
    """Return the arguments; if elastic and `save` has a checkpoint, they resume from `save`."""
    if not arguments.checkpoints.elastic or latest_step(arguments.save) is None:
        return arguments
    return replace(arguments, load=arguments.save, finetune=False)


def plan_for_all(
    directory: Path, arguments: RunArguments, launch: RankLaunch, store: dist.Store
) -> Path:
    """Return a plan directory for the launched processes, made by rank 0 if needed; collective."""
    if read_plan(directory).parallel.world_size == launch.world_size:
        return directory
    step = latest_step(arguments.save) or 0
    processes = launch.world_size
    key = f"plan after {step} steps for {processes}"
    if launch.rank == 0:
        try:
            with lock_folder("--save", arguments.save, _log.info):
                made = plan_again(directory, arguments.save, step, gpus=processes)
            assert made is not None, "plans for other numbers of devices have no minimum gain"
            answer = {"plan": str(made[0])}
        except (UserError, OSError) as error:
            answer = {"error": f"no plan for the {processes} processes launched: {error}"}
        store.set(key, json.dumps(answer))
    answer = json.loads(store.get(key))  # blocks until rank 0 has set it
    if "error" in answer:
        raise UserError(answer["error"])
    _log.info(f"planned for the {processes} processes launched: {answer['plan']}")
    return Path(answer["plan"])


def load_run(arguments: RunArguments, planned: PlanFiles, launch: RankLaunch) -> TrainingRun:
    """Return the run with opened data; raise UserError, alike on all ranks, if checks fail."""
    plan = planned.plan
    arguments = replace(arguments, optimization=fill_rates(arguments.optimization, plan))
    launch.check_against(plan.parallel)
    check_provider_of(plan, arguments.provider)
    if arguments.samples.drop_path and not plan.model.takes_images:
        raise UserError(
            f"--drop-path-rate needs an encoder of tiles, which {plan.model.name} lacks; drop it"
        )
    tokenizer = open_tokenizer(arguments.tokenizer_model)
    assert plan.data is not None and plan.data.origin is not None
    origin = plan.data.origin
    check_same_data("the tokenizer", text_sha256(plan.model, tokenizer), origin.tokenizer_sha256)
    training_data = heldout_data = None
    storage, cache = arguments.storage, None
    if storage.data_cache is not None:
        cache = BlockCache.open(storage.data_cache, storage.data_cache_gib)
    root = storage.data_root
    if not arguments.skip_train:
        assert arguments.data is not None
        index = None if storage.data_index is None else DataIndex.open_complete(storage.data_index)
        training_data = Annotations.open(arguments.data, index, cache, root)
        check_same_data(str(arguments.data), training_data.sha256, origin.data_sha256)
        # Training from another run's weights is a new run: its step count starts at 0.
        save, step = arguments.save, latest_step(arguments.save)
        if step is not None and (arguments.finetune or not arguments.continues_run):
            raise UserError(
                f"{save}: holds a run of {step} steps; resume it with --load {save}, or give "
                "another --save"
            )
    if arguments.evaluation is not None:
        heldout_data = Annotations.open(arguments.evaluation.eval_data, cache=cache, below=root)
    run = TrainingRun(arguments, planned, tokenizer, launch, training_data, heldout_data)
    traced = arguments.profile_steps
    if traced and traced[-1] >= run.last_step:
        raise UserError(
            f"--profile-steps: step {traced[-1]} was given, and the run ends with step "
            f"{run.last_step - 1}; steps count from 0"
        )
    return run


def fill_rates(options: OptimizationOptions, plan: Plan) -> OptimizationOptions:
    """Return the options with default learning rates filled in; UserError if rates conflict."""
    default = LEARNING_RATE if plan.adapters is None else ADAPTER_LEARNING_RATE
    lr = default if options.lr is None else options.lr
    if options.min_lr > lr:
        raise UserError(
            f"--min-lr {options.min_lr:g} must be at most --lr, {lr:g}: lower it, or raise --lr"
        )
    if "vision" in plan.model.encoders and "vision" not in plan.frozen:
        vision_lr = lr * VISION_SHARE if options.vision_lr is None else options.vision_lr
        return replace(options, lr=lr, vision_lr=vision_lr)
    if options.vision_lr is not None:
        raise UserError("--vision-lr: the plan trains no vision encoder; leave the option out")
    return replace(options, lr=lr)


def execute(run: TrainingRun, store: dist.Store) -> None:
    """Join the processes, then train and evaluate; an error on any rank ends this process."""
    arguments = run.arguments
    # Outermost: other ranks may still write to the folder after an error of this rank.
    with ExitStack() as lock, ending_together(run.launch, store):
        if run.launch.rank == 0:
            lock.enter_context(lock_folder("--save", arguments.save, _log.info))
        links = initialize_distributed(run.launch, run.plan.parallel, arguments.seed, store=store)
        if arguments.skip_train:
            assert arguments.load is not None
            trainer = _build_run_trainer(run, links)
            steps = load_weights(arguments.load, run.plan, trainer.stages)
            outcome = RunOutcome(steps, 0, False)
        else:
            run, trainer, outcome = _train_run(run, links)
        if outcome.stopped:
            _log.info(
                f"stopped as asked after step {outcome.steps}; to go on, start `omnibal run` or "
                f"the script again, or give this command with --load {arguments.save}"
            )
        elif run.heldout_data is not None:
            evaluate_heldout(run, trainer, outcome.steps)
        shut_down_distributed()


def _build_run_trainer(run: TrainingRun, links: PipelineLinks) -> Trainer:
    arguments = run.arguments
    return build_trainer(
        run.plan,
        links,
        arguments.optimization,
        steps=run.data.steps,
        seed=arguments.seed,
        provider=arguments.provider,
        origin="seeded" if arguments.load is None else "loaded",
    )


def _train_run(run: TrainingRun, links: PipelineLinks) -> tuple[TrainingRun, Trainer, RunOutcome]:
    """Train to the last step or a stop; return the last plan's run and trainer; collective."""
    trainer = _build_run_trainer(run, links)
    done = _load_state(run, trainer)
    if done.steps >= run.last_step:
        _log.info(f"nothing to train: {done.steps} steps are done, of {run.last_step} requested")
        return run, trainer, done
    sinks = _prepare_folder(run, done.steps) if run.launch.rank == 0 else []
    with StopSignal() as stop:
        while not done.stopped and done.steps < run.last_step:
            steps = done.steps
            is_due = steps in run.arguments.checkpoints.replan_at
            # A resumed run may have planned again after these steps already.
            is_due = is_due and MadePlan.read(run.directory).step != steps
            replanned = replan_and_log(run, steps) if is_due else None
            if replanned is not None:
                # Free its memory before building the next trainer.
                del trainer
                gc.collect()
                run, trainer = replanned, _build_run_trainer(replanned, links)
                _load_state(run, trainer)
            done = train_plan(run, trainer, done, stop, sinks)
    for sink in sinks:
        sink.close()
    return run, trainer, done


def replan_and_log(run: TrainingRun, steps: int) -> TrainingRun | None:
    """Plan again from measured times; return the new run, None without enough gain; collective."""
    answer: list[Any] = [None, None]
    if run.launch.rank == 0:
        made, reason = None, f"no plan saves {MIN_REPLAN_GAIN:.0%} of a step, the prediction error"
        try:
            made = plan_again(run.directory, run.arguments.save, steps, min_gain=MIN_REPLAN_GAIN)
        except (UserError, OSError) as error:
            reason = str(error)
        answer = [None, f"not planned again after step {steps}: {reason}"]
        if made is not None:
            directory, summary = made
            answer = [
                directory,
                (
                    f"planned again after step {steps}: {summary['step_ms']:.0f} ms per step "
                    f"predicted, {summary['before_ms']:.0f} ms before; going on with {directory}"
                ),
            ]
    dist.broadcast_object_list(answer, src=0)
    directory, line = answer
    _log.info(line)
    if directory is None:
        return None
    arguments = replace(run.arguments, load=run.arguments.save, finetune=False)
    return replace(run, arguments=arguments, planned=open_trainable(directory))


def _prepare_folder(run: TrainingRun, first_step: int) -> list[MetricsSink]:
    """Drop records of steps that are trained again; return the requested sinks."""
    arguments, sinks = run.arguments, list[MetricsSink]()
    if arguments.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(arguments.tensorboard_dir, first_step))
    if arguments.wandb_project is not None:
        sinks.append(WandbSink(arguments.wandb_project, arguments.save.name, arguments.save))
    first_logged = first_step if arguments.continues_run else 0
    drop_records(arguments.save / RUN_FILE, first_logged)
    # A validation counts the steps before it.
    drop_records(arguments.save / VALIDATION_FILE, first_logged + 1)
    return sinks


def train_plan(
    run: TrainingRun,
    trainer: Trainer,
    done: RunOutcome,
    stop: StopSignal,
    sinks: list[MetricsSink],
) -> RunOutcome:
    """Train up to the next step in `replan_at`, the last or a stop; return the outcome so far."""
    arguments, checkpoints = run.arguments, run.arguments.checkpoints
    first_step, last_step = done.steps, run.last_step
    if run.plan.prediction is not None:
        note = too_few_loaders(run.plan.prediction, arguments.num_workers)
        if note is not None:
            _log.info(note)
    pauses = [step for step in checkpoints.replan_at if first_step < step < last_step]
    pause_step = min([*pauses, last_step])
    validation = _make_validation(run, trainer)
    if run.launch.rank == 0:
        _write_run_info(run, first_step if arguments.continues_run else 0)
    writer = CheckpointWriter(
        arguments.save, run.plan, trainer.stages, trainer.optimizers, trainer.scheduler,
        _checkpoint_options(run, trainer),
        keep_last=checkpoints.keep_checkpoints, asynchronous=checkpoints.async_save,
    )  # fmt: skip
    health = RunHealth(arguments.max_skipped_steps, done.skipped_steps)
    portions = _load_portions(run, trainer, range(first_step, pause_step), validation)
    with closing(portions):
        loop = TrainingLoop(
            trainer, portions, arguments, last_step, writer, health, sinks, lambda: stop.requested
        )
        return loop.run(first_step, pause_step)


def _checkpoint_options(run: TrainingRun, trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must not change between a checkpoint and its resume."""
    assert run.training_data is not None
    options: dict[str, Any] = asdict(trainer.options) | {
        "seed": run.arguments.seed,
        "augmented": list(run.training_data.augmented_sources),
        "frozen": list(run.plan.frozen),
    }
    if run.plan.adapters is not None:
        options["adapters"] = run.plan.adapters.model_dump(mode="json")
    return options


def _load_portions(
    run: TrainingRun, trainer: Trainer, steps: range, validation: Validation | None
) -> Generator[RunData, None, None]:
    """Yield this rank's data of `steps`, one portion of the plan at a time."""
    sharing = Sharing(dp_rank=parallel_state.get_data_parallel_rank(), levels=run.plan.pack_levels)
    job, first = run.planned.job, steps.start
    while first < steps.stop:
        portion, packs, lengths = open_portion(run.planned, first)
        shares = encoder_shares(run.plan, packs, lengths, run.launch.rank)
        stop = min(portion.stop, steps.stop)
        make_dataset = partial(
            PackDataset,
            run.make_reader(run.training_data),
            packs,
            lengths,
            sharing.rows(packs, first, stop),
            options=run.arguments.samples,
            sharing=sharing,
        )
        texts = make_dataset(stage=trainer.units)
        dataset: PackDataset | EncodingDataset = texts
        if shares is not None:
            items = make_dataset(stage=encoders_stage(run.plan.model))
            dataset = EncodingDataset(texts, items, shares, first, stop)
        batches = load_batches(dataset, run.arguments.num_workers, current_device())
        with closing(batches):
            yield RunData(
                stop=stop,
                scheduled=packs,
                lengths=lengths,
                sharing=sharing,
                encoder_shares=shares,
                batches=batches,
                pack_flops=pack_flops(job, packs.packs, lengths),
                peak_flops_per_s=job.cluster.tflops(job.precision) * 1e12 * job.parallel.world_size,
                validation=validation,
            )
        first = stop


def _load_state(run: TrainingRun, trainer: Trainer) -> RunOutcome:
    """Load the checkpoint, or only weights to finetune; return the steps of this run so far."""
    arguments = run.arguments
    if arguments.load is None:
        _log.info("starting from random weights, as no --load was given")
        return RunOutcome(0, 0, False)
    if arguments.finetune:
        steps = load_weights(arguments.load, run.plan, trainer.stages)
        for optimizer in trainer.optimizers:
            if optimizer is not None:
                optimizer.reload_model_params()  # copies bf16 weights to fp32 main weights
        _log.info(f"starting from the weights of {arguments.load} after step {steps}")
        return RunOutcome(0, 0, False)
    loaded = load_checkpoint(
        arguments.load, run.plan, trainer.stages, trainer.optimizers, trainer.scheduler,
        _checkpoint_options(run, trainer), partial(hash_steps, run.directory),
    )  # fmt: skip
    if run.launch.rank == 0 and arguments.continues_run:
        name_newest(arguments.save, loaded.step)  # newer, broken checkpoints may have been skipped
    _log.info(f"resuming {arguments.load} after step {loaded.step}")
    return RunOutcome(loaded.step, loaded.common["training_state"]["skipped_steps"], False)


def _write_run_info(run: TrainingRun, first_step: int) -> None:
    """Record the plan's hash in the run directory, valid from `first_step` or earlier."""
    save, digest = run.arguments.save, plan_sha256(run.plan)
    if (save / RUN_INFO_FILE).exists() and read_run_info(save).plan_sha256 == digest:
        first_step = min(read_run_info(save).since_step, first_step)
    info = RunInfo(
        model=run.plan.model.name,
        packs_sha256=run.data.packs_sha256,
        provider=run.arguments.provider,
        plan_sha256=digest,
        since_step=first_step,
    )
    write_run_info(info, save)


def pack_flops(job: JobSpec, packs: Packs, lengths: Lengths) -> np.ndarray:
    """Return FLOPs of training each pack, encoders included, float64 [packs]."""
    flops = model_flops(job.model, job.frozen, job.adapters)
    return pack_features(packs, lengths, feature_names(job.model)) @ flops


def _make_validation(run: TrainingRun, trainer: Trainer) -> Validation | None:
    arguments, evaluation = run.arguments, run.arguments.evaluation
    if evaluation is None or evaluation.eval_interval is None:
        return None
    reader = run.make_reader(run.heldout_data)
    levels = run.plan.pack_levels
    longest = max(levels, key=lambda level: level.caps["tokens"])
    packs = pack_validation(reader, evaluation.eval_samples, longest, run.plan.parallel.data)
    if packs.left_out:
        _log.info(f"validation leaves out {packs.left_out} held-out samples that exceed a cap")
    stage, rank = trainer.forward_units, parallel_state.get_data_parallel_rank()
    dataset = packs.dataset(reader, stage, rank, arguments.samples)
    sharing, workers = packs.sharing(rank), arguments.num_workers
    shapes = MicroBatchShape.of_shares(packs.scheduled, packs.lengths, dataset.rows, sharing)
    return Validation(
        interval=evaluation.eval_interval,
        batches=lambda: MicroBatchStream(
            batches=load_batches(dataset, workers, current_device()), shapes=shapes
        ),
        slots=sharing.slots(packs.scheduled, run.plan.parallel),
    )


def evaluate_heldout(run: TrainingRun, trainer: Trainer, step: int) -> None:
    """Answer held-out questions; write accuracy by kind to evaluation.json."""
    given, levels = run.arguments.evaluation, run.plan.pack_levels
    assert given is not None
    # Limits of questions answered at once: a rank's largest share of a pack of any level.
    caps = {
        name: max(1, *(level.caps[name] // level.context for level in levels))
        for name in run.data.caps.names
    }
    with progress_of_rank(run.launch.rank) as progress:
        task = progress.add_task("answering held-out questions", total=None)
        evaluation = evaluate_answers(
            trainer,
            Caps.of(**caps),
            run.make_reader(run.heldout_data),
            step,
            lambda done, total: progress.update(task, completed=done, total=total),
            samples=given.eval_samples,
            max_new_tokens=given.max_new_tokens,
        )
    if run.launch.rank == 0:
        _log.info(f"wrote {write_evaluation(evaluation, run.arguments.save)}")
