"""A run of pretrain_vlm.py after its command line is parsed: checks its inputs, then trains."""

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
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.inputs.data import PackDataset, load_batches
from megatron.vlm.inputs.encoder_data import EncodingDataset
from megatron.vlm.inputs.encoder_share import EncoderShares
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
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.run.log import progress_of_rank
from megatron.vlm.run.loop import RunData, RunOptions, RunOutcome, TrainingLoop, encoder_shares
from megatron.vlm.run.metrics import MetricsSink, TensorBoardSink, WandbSink
from megatron.vlm.run.plans import MadePlan, newest_plan, plan_again
from megatron.vlm.run.stop import StopSignal
from megatron.vlm.run.watch import ending_together
from megatron.vlm.step.evaluate import Validation, evaluate
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer
from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import UserError
from omnibal.base.folder_lock import lock_folder
from omnibal.cost.analytic import model_flops
from omnibal.cost.model import pack_features
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
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.loader_time import too_few_loaders
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import encoders_stage

LEAST_GAIN = 0.02
"""Minimum share of step time that a new plan must save to be worth a reload. Predictions are
accurate to some percent (docs/results.md), differences between plans of one job to less."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A training run with checked arguments, plan and data, before processes join."""

    arguments: RunArguments
    planned: PlanFiles
    tokenizer: Tokenizer
    launch: Launch
    training_data: Annotations | None
    """Training samples. None if only evaluating."""
    heldout_data: Annotations | None
    """Held-out samples. None without evaluation."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def directory(self) -> Path:
        assert self.planned.directory is not None
        return self.planned.directory

    @property
    def last_step(self) -> int:
        return min(self.arguments.train_iters or self.data.steps, self.data.steps)

    @property
    def data(self) -> DataPlan:
        """Origin of the packs; checked to be present."""
        assert self.plan.data is not None
        return self.plan.data

    def reader(self, annotations: Annotations | None) -> SampleReader:
        """Make a reader of a dataset's samples for this run's model."""
        assert annotations is not None
        return SampleReader(annotations, self.tokenizer, self.plan.model)


def open_trainable(directory: Path) -> PlanFiles:
    """Read a plan and check that it can be trained."""
    planned = open_plan(directory, to_train=True)
    obstacles = training_obstacles(planned.plan)
    if obstacles:
        raise UserError(f"{directory}: {'; '.join(obstacles)}")
    return planned


def plan_to_train(given: Path, arguments: RunArguments, launch: Launch) -> Path:
    """Newest plan directory to continue with, replanned or given."""
    is_continued = arguments.continues_run or arguments.checkpoints.elastic
    if arguments.finetune or not is_continued:
        return given
    step = latest_step(arguments.save) or 0
    newest = newest_plan(given, arguments.save, step, launch.world_size)
    if newest.directory != given:
        _log.info(f"going on with {newest.directory}, made after step {newest.step}")
    return newest.directory


def resume_elastic(arguments: RunArguments) -> RunArguments:
    """Set `load` of an elastic run to its own newest checkpoint, if any."""
    if not arguments.checkpoints.elastic or latest_step(arguments.save) is None:
        return arguments
    return replace(arguments, load=arguments.save, finetune=False)


def plan_for_all(
    directory: Path, arguments: RunArguments, launch: Launch, store: dist.Store
) -> Path:
    """Plan directory for the current number of processes, made by rank 0 if needed; collective."""
    if read_plan(directory).parallel.world_size == launch.world_size:
        return directory
    step = latest_step(arguments.save) or 0
    processes = launch.world_size
    key = f"plan after {step} steps for {processes}"
    if launch.rank == 0:
        try:
            with lock_folder("--save", arguments.save, _log.info):
                made = plan_again(directory, arguments.save, step, gpus=processes)
            assert made is not None, "other devices are not compared"
            answer = {"plan": str(made[0])}
        except (UserError, OSError) as error:
            reason = f"{processes} processes came, and the plan is for others: {error}"
            answer = {"error": reason}
        store.set(key, json.dumps(answer))
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise UserError(answer["error"])
    _log.info(f"planned for the {processes} processes that came: {answer['plan']}")
    return Path(answer["plan"])


def load_run(arguments: RunArguments, planned: PlanFiles, launch: Launch) -> Run:
    """Read and check data, tokenizer and directories. All ranks raise the same errors."""
    plan = planned.plan
    arguments = replace(arguments, optimization=fill_rates(arguments.optimization, plan))
    launch.check_against(plan.parallel)
    check_provider_of(plan, arguments.provider)
    if arguments.samples.drop_path and not plan.model.takes_images:
        raise UserError(
            f"--drop-path-rate was given, but {plan.model.name} has no encoder of images, whose "
            "layers are dropped; leave the option out"
        )
    tokenizer = open_tokenizer(arguments.tokenizer_model)
    assert plan.data is not None and plan.data.origin is not None
    origin = plan.data.origin
    check_same_data("the tokenizer", text_sha256(plan.model, tokenizer), origin.tokenizer_sha256)
    training_data = heldout_data = None
    storage, cache = arguments.storage, None
    if storage.data_cache is not None:
        cache = BlockCache.open(storage.data_cache, storage.data_cache_gib)
    below = storage.data_root
    if not arguments.skip_train:
        assert arguments.data is not None
        index = None if storage.data_index is None else DataIndex.read(storage.data_index)
        training_data = Annotations.open(arguments.data, index, cache, below)
        check_same_data(str(arguments.data), training_data.sha256, origin.data_sha256)
        # Training from other weights is a new run.
        save, step = arguments.save, latest_step(arguments.save)
        if step is not None and (arguments.finetune or not arguments.continues_run):
            raise UserError(
                f"{save}: holds a run of {step} steps; resume it with --load {save}, or give "
                "another --save"
            )
    if arguments.evaluation is not None:
        heldout_data = Annotations.open(arguments.evaluation.eval_data, cache=cache, below=below)
    run = Run(arguments, planned, tokenizer, launch, training_data, heldout_data)
    traced = arguments.profile_steps
    if traced and traced[-1] >= run.last_step:
        raise UserError(
            f"--profile-steps: step {traced[-1]} was given, and the run ends with step "
            f"{run.last_step - 1}; steps count from 0"
        )
    return run


def fill_rates(options: OptimizationOptions, plan: Plan) -> OptimizationOptions:
    """Fill in the learning rates that are not given, as most published recipes have them."""
    usual = LEARNING_RATE if plan.adapters is None else ADAPTER_LEARNING_RATE
    lr = usual if options.lr is None else options.lr
    if options.min_lr > lr:
        raise UserError(
            f"--min-lr {options.min_lr:g} must be at most --lr, {lr:g}: lower it, or raise --lr"
        )
    if "vision" in plan.model.encoders and "vision" not in plan.frozen:
        vision_lr = lr * VISION_SHARE if options.vision_lr is None else options.vision_lr
        return replace(options, lr=lr, vision_lr=vision_lr)
    if options.vision_lr is not None:
        raise UserError(
            "--vision-lr was given, but the plan trains no vision encoder; leave it out"
        )
    return replace(options, lr=lr)


def execute(run: Run, store: dist.Store) -> None:
    """Join the processes, then train and evaluate; any rank's error ends the process."""
    arguments = run.arguments
    # The lock is freed last: other ranks may still write after an error of this rank.
    with ExitStack() as held, ending_together(run.launch, store):
        if run.launch.rank == 0:
            held.enter_context(lock_folder("--save", arguments.save, _log.info))
        links = initialize_distributed(run.launch, run.plan.parallel, arguments.seed, store=store)
        if arguments.skip_train:
            assert arguments.load is not None
            trainer = _build(run, links)
            steps = load_weights(arguments.load, run.plan, trainer.stages)
            outcome = RunOutcome(steps, 0, False)
        else:
            run, trainer, outcome = _train(run, links)
        if outcome.stopped:
            _log.info(
                f"stopped as asked after step {outcome.steps}; to go on, start `omnibal run` or "
                f"the script again, or give this command with --load {arguments.save}"
            )
        elif run.heldout_data is not None:
            evaluate_heldout(run, trainer, outcome.steps)
        shut_down_distributed()


def _build(run: Run, links: PipelineLinks) -> Trainer:
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


def _train(run: Run, links: PipelineLinks) -> tuple[Run, Trainer, RunOutcome]:
    """Train until the last step, replanning if requested; collective over all ranks."""
    trainer = _build(run, links)
    done = _load(run, trainer)
    sinks: list[MetricsSink] = []
    is_first = True
    with StopSignal() as stop:
        while True:
            steps, is_asked = done.steps, done.steps in run.arguments.checkpoints.replan_at
            is_due = is_asked and steps < run.last_step
            # Not if already replanned after these steps.
            is_due = is_due and MadePlan.of(run.directory).step != steps
            replanned = replan_and_log(run, steps) if is_due else None
            if replanned is not None:
                # Free its memory before building the next trainer.
                del trainer
                gc.collect()
                run, trainer = replanned, _build(replanned, links)
                _load(run, trainer)
            done = train_plan(run, trainer, done, stop, sinks, is_first=is_first)
            if done.stopped or done.steps >= run.last_step:
                break
            is_first = False
    for sink in sinks:
        sink.close()
    return run, trainer, done


def replan_and_log(run: Run, steps: int) -> Run | None:
    """Replan from measured times on rank 0; collective. None if the gain is too small."""
    answer: list[tuple[str | None, str]] = [(None, "")]
    if run.launch.rank == 0:
        answer = [_replan(run, steps)]
    dist.broadcast_object_list(answer, src=0)
    [(directory, line)] = answer
    _log.info(line)
    if directory is None:
        return None
    arguments = replace(run.arguments, load=run.arguments.save, finetune=False)
    return replace(run, arguments=arguments, planned=open_trainable(Path(directory)))


def _replan(run: Run, steps: int) -> tuple[str | None, str]:
    """Replan; return the directory of a better plan, if any, and a log line."""
    try:
        made = plan_again(run.directory, run.arguments.save, steps, least_gain=LEAST_GAIN)
    except (UserError, OSError) as error:
        return None, f"not planned anew after step {steps}: {error}"
    if made is None:
        return None, (
            f"not planned anew after step {steps}: no plan saves {LEAST_GAIN:.0%} of a step, which "
            "predictions may be off by"
        )
    directory, summary = made
    return str(directory), (
        f"planned anew after step {steps}: {summary['step_ms']:.0f} ms a step are predicted, by "
        f"the same costs {summary['before_ms']:.0f} ms before; going on with {directory}"
    )


def train_plan(
    run: Run,
    trainer: Trainer,
    done: RunOutcome,
    stop: StopSignal,
    sinks: list[MetricsSink],
    *,
    is_first: bool,
) -> RunOutcome:
    """Train until the next replanning step or the end; at first prepare the run's directory."""
    arguments, evaluation = run.arguments, run.arguments.evaluation
    checkpoints, first_step, last_step = arguments.checkpoints, done.steps, run.last_step
    if first_step >= last_step:
        _log.info(f"nothing to train: {first_step} steps are done, and {last_step} are asked for")
        return done
    if run.plan.prediction is not None:
        note = too_few_loaders(run.plan.prediction, arguments.num_workers)
        if note is not None:
            _log.info(note)
    pauses = [step for step in checkpoints.replan_at if first_step < step < last_step]
    pause_step = min([*pauses, last_step])
    validation = _validation(run, trainer)
    if run.launch.rank == 0 and is_first:
        sinks += _open_run(run, first_step)
    elif run.launch.rank == 0:
        _write_info(run, first_step)
    writer = CheckpointWriter(
        arguments.save, run.plan, trainer.stages, trainer.optimizers, trainer.scheduler,
        _options(run, trainer),
        keep_last=checkpoints.keep_checkpoints, asynchronous=checkpoints.async_save,
    )  # fmt: skip
    options = RunOptions(
        save=arguments.save,
        save_interval=checkpoints.save_interval,
        last_step=last_step,
        pause_step=pause_step,
        eval_interval=None if evaluation is None else evaluation.eval_interval,
        exit_after_failed_saves=checkpoints.exit_after_failed_saves,
        profile_steps=arguments.profile_steps,
    )
    health = RunHealth(arguments.max_skipped_steps, done.skipped_steps)
    portions = _portions(run, trainer, range(first_step, pause_step), validation)
    with closing(portions):
        loop = TrainingLoop(
            trainer, portions, options, writer, health, sinks, lambda: stop.requested
        )
        return loop.run(first_step)


def _options(run: Run, trainer: Trainer) -> dict[str, Any]:
    """Settings that the checkpoint's optimizer state depends on."""
    assert run.training_data is not None
    options: dict[str, Any] = asdict(trainer.options) | {
        "seed": run.arguments.seed,
        "augmented": list(run.training_data.augmented_sources),
        "frozen": list(run.plan.frozen),
    }
    if run.plan.adapters is not None:
        options["adapters"] = run.plan.adapters.model_dump(mode="json")
    return options


def _portions(
    run: Run, trainer: Trainer, steps: range, validation: Validation | None
) -> Generator[RunData, None, None]:
    """Yield this rank's data of some steps, a portion at a time."""
    sharing = Sharing(dp_rank=parallel_state.get_data_parallel_rank(), levels=run.plan.pack_levels)
    job, first = run.planned.job, steps.start
    while first < steps.stop:
        held, packs, lengths = open_portion(run.planned, first)
        shares = encoder_shares(run.plan, packs, lengths, run.launch.rank)
        stop = min(held.stop, steps.stop)
        dataset = _dataset(run, trainer.units, sharing, shares, packs, lengths, range(first, stop))
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


def _dataset(
    run: Run,
    units: Stage,
    sharing: Sharing,
    shares: EncoderShares | None,
    packs: ScheduledPacks,
    lengths: Lengths,
    steps: range,
) -> PackDataset | EncodingDataset:
    """Dataset of this rank's micro-batches in some steps, with encoder passes if data-parallel."""
    read = partial(
        PackDataset,
        run.reader(run.training_data),
        packs,
        lengths,
        sharing.rows(packs, steps.start, steps.stop),
        options=run.arguments.samples,
        sharing=sharing,
    )
    texts = read(stage=units)
    if shares is None:
        return texts
    items = read(stage=encoders_stage(run.plan.model))
    return EncodingDataset(texts, items, shares, steps.start, steps.stop)


def _load(run: Run, trainer: Trainer) -> RunOutcome:
    """Load the checkpoint, if any, and return its progress."""
    arguments = run.arguments
    if arguments.load is None:
        _log.info("starting from random weights, as no --load was given")
        return RunOutcome(0, 0, False)
    if arguments.finetune:
        steps = load_weights(arguments.load, run.plan, trainer.stages)
        for optimizer in trainer.optimizers:
            if optimizer is not None:
                optimizer.reload_model_params()
        _log.info(f"starting from the weights of {arguments.load} after step {steps}")
        return RunOutcome(0, 0, False)
    loaded = load_checkpoint(
        arguments.load, run.plan, trainer.stages, trainer.optimizers, trainer.scheduler,
        _options(run, trainer), partial(hash_steps, run.directory),
    )  # fmt: skip
    if run.launch.rank == 0 and arguments.continues_run:
        name_newest(arguments.save, loaded.step)  # a broken one may have been passed over
    _log.info(f"resuming {arguments.load} after step {loaded.step}")
    return RunOutcome(loaded.step, loaded.training_state["skipped_steps"], False)


def _open_run(run: Run, first_step: int) -> list[MetricsSink]:
    """Prepare the run's directory, without log entries after the checkpoint; open the sinks."""
    arguments = run.arguments
    sinks: list[MetricsSink] = []
    if arguments.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(arguments.tensorboard_dir, first_step))
    if arguments.wandb_project is not None:
        sinks.append(WandbSink(arguments.wandb_project, arguments.save.name, arguments.save))
    first_logged = first_step if arguments.continues_run else 0
    drop_records(arguments.save / RUN_FILE, first_logged)
    # A validation counts the steps before it.
    drop_records(arguments.save / VALIDATION_FILE, first_logged + 1)
    _write_info(run, first_logged)
    return sinks


def _write_info(run: Run, first_step: int) -> None:
    """Record the plan's hash in the run directory, from `first_step` at the latest."""
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
    """FLOPs of training each pack, wherever encoders run. [packs]"""
    flops = model_flops(job.model, job.frozen, job.adapters)
    return pack_features(packs, lengths, feature_names(job.model)) @ flops


def _validation(run: Run, trainer: Trainer) -> Validation | None:
    arguments, evaluation = run.arguments, run.arguments.evaluation
    if evaluation is None or evaluation.eval_interval is None:
        return None
    reader = run.reader(run.heldout_data)
    levels = run.plan.pack_levels
    longest = max(levels, key=lambda level: level.caps["tokens"])
    packs = pack_validation(reader, evaluation.eval_samples, longest, run.plan.parallel.data)
    if packs.left_out:
        _log.info(f"validation leaves out {packs.left_out} held-out samples that exceed a cap")
    stage, rank = trainer.forward_units, parallel_state.get_data_parallel_rank()
    dataset = packs.dataset(reader, stage, rank, arguments.samples)
    shapes, workers = packs.shapes(rank), arguments.num_workers
    return Validation(
        batches=lambda: MicroBatchStream(
            batches=load_batches(dataset, workers, current_device()), shapes=shapes
        ),
        slots=packs.slots(rank, run.plan.parallel),
    )


def evaluate_heldout(run: Run, trainer: Trainer, step: int) -> None:
    """Answer held-out questions; write accuracy by kind to evaluation.json."""
    given, levels = run.arguments.evaluation, run.plan.pack_levels
    assert given is not None
    # Questions answered at once: a rank's largest share of any pack.
    caps = {
        name: max(1, *(level.caps[name] // level.context for level in levels))
        for name in run.data.caps.names
    }
    with progress_of_rank(run.launch.rank) as progress:
        task = progress.add_task("answering held-out questions", total=None)
        evaluation = evaluate(
            trainer,
            Caps.of(**caps),
            run.reader(run.heldout_data),
            step,
            lambda done, total: progress.update(task, completed=done, total=total),
            samples=given.eval_samples,
            max_new_tokens=given.max_new_tokens,
        )
    if run.launch.rank == 0:
        _log.info(f"wrote {write_evaluation(evaluation, run.arguments.save)}")
