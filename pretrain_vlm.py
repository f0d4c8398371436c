"""Train a vision-language model as an OmniBal plan says.

    torchrun --nproc-per-node 2 pretrain_vlm.py --plan PLAN --data META.json \
        --tokenizer-model tokenizer.model --save RUN

Parse, load the plan, check that plan, launch and data agree, build, train.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron.vlm.backend import current_device
from megatron.vlm.checkpoint import latest_step, load_checkpoint, load_weights
from megatron.vlm.data import PackDataset, SampleReader, load_batches
from megatron.vlm.evaluate import EvaluationOptions, evaluate
from megatron.vlm.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.train import (
    OptimizationOptions,
    RunOptions,
    Trainer,
    build_trainer,
    own_rows,
    train,
)
from omnibal.check import check_plan, training_obstacles
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.data.packs import ScheduledPacks, read_packs
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import EXIT_USER_ERROR, UserError
from omnibal.plan import LENGTHS_FILE, PACKS_FILE, Plan, read_plan
from omnibal.runlog import RUN_FILE, RunInfo, write_evaluation, write_run_info


class Parser(argparse.ArgumentParser):
    """Reports a user's mistake like everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see pretrain_vlm.py --help")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    if int(text) < 0:
        raise ValueError
    return int(text)


def fraction(text: str) -> float:
    """A number from 0 to below 1."""
    if not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def parse_arguments() -> argparse.Namespace:
    """Megatron-LM's flag names wherever it has the option.

    Raises:
        UserError: an option is unknown, missing, or not of its kind.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    job = parser.add_argument_group("job")
    job.add_argument("--plan", type=Path, required=True, help="directory made by `omnibal plan`")
    job.add_argument(
        "--data", type=Path, help="meta JSON that the plan's lengths were scanned from"
    )
    job.add_argument("--tokenizer-model", type=Path, required=True, help="SentencePiece model")
    job.add_argument("--save", type=Path, required=True, help="directory of the run")
    job.add_argument("--load", type=Path, help="directory of a run to resume")
    job.add_argument(
        "--save-interval", type=positive, default=1000, help="steps between checkpoints"
    )
    job.add_argument(
        "--train-iters", type=positive, help="stop after this many of the plan's steps"
    )
    job.add_argument("--num-workers", type=natural, default=2, help="loader processes of each rank")
    job.add_argument("--seed", type=int, default=42, help="of the initial weights")
    optimization = parser.add_argument_group("optimization (AdamW)")
    optimization.add_argument("--lr", type=float, default=4e-5)
    optimization.add_argument("--min-lr", type=float, default=0.0)
    optimization.add_argument(
        "--lr-decay-style", choices=["cosine", "linear", "constant"], default="cosine"
    )
    optimization.add_argument("--lr-warmup-fraction", type=fraction, default=0.03)
    optimization.add_argument("--weight-decay", type=float, default=0.05)
    optimization.add_argument("--adam-beta1", type=fraction, default=0.9)
    optimization.add_argument("--adam-beta2", type=fraction, default=0.999)
    optimization.add_argument("--adam-eps", type=float, default=1e-8)
    optimization.add_argument("--clip-grad", type=float, default=1.0)
    evaluation = parser.add_argument_group("evaluation by greedy answers")
    evaluation.add_argument("--eval-data", type=Path, help="meta JSON of held-out samples")
    evaluation.add_argument("--eval-samples", type=positive, default=500)
    evaluation.add_argument(
        "--max-new-tokens",
        type=positive,
        default=64,
        help="longest answer; every token runs the whole question again, images included",
    )
    evaluation.add_argument("--skip-train", action="store_true", help="only evaluate --load")
    arguments = parser.parse_args()
    if arguments.skip_train and not (arguments.load and arguments.eval_data):
        parser.error("--skip-train evaluates a trained model: give --load and --eval-data")
    if not arguments.skip_train and not arguments.data:
        parser.error("training needs --data (or --skip-train to only evaluate)")
    if not 0 <= arguments.min_lr <= arguments.lr:
        parser.error(f"--min-lr {arguments.min_lr} must be from 0 to --lr {arguments.lr}")
    return arguments


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


def load_job(arguments: argparse.Namespace, launch: Launch) -> Job:
    """Read and check the inputs; every rank finds the same mistakes here.

    Raises:
        UserError: the plan does not hold, or the launch, the data, the tokenizer or the run's
            directory do not fit it.
    """
    check_plan(arguments.plan)
    plan = read_plan(arguments.plan)
    obstacles = training_obstacles(plan)
    if obstacles:
        raise UserError(f"{arguments.plan}: {'; '.join(obstacles)}")
    launch.check_against(plan.parallel)
    tokenizer = Tokenizer(arguments.tokenizer_model)
    origin = plan.data.origin
    _check_same("the tokenizer", tokenizer.sha256, origin.tokenizer_sha256)
    training_data = heldout_data = None
    if not arguments.skip_train:
        training_data = Annotations.open(arguments.data)
        _check_same(str(arguments.data), training_data.sha256, origin.data_sha256)
        _check_no_other_run(arguments.save, arguments.load)
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


def _check_same(name: str, given: str, planned: str) -> None:
    if planned != given:
        raise UserError(
            f"the plan was made for other data: {name} has sha256 {given[:12]}, but the plan's "
            f"lengths were scanned from {planned[:12]}; use what was scanned, or run "
            "`omnibal lengths` and `omnibal plan` on this"
        )


def run_job(job: Job, arguments: argparse.Namespace) -> None:
    """Join the processes, then train and evaluate.

    Raises:
        UserError: a checkpoint does not fit, or a sample cannot be read.
    """
    links = initialize_distributed(job.launch, job.plan.parallel, arguments.seed)

    def say(line: str) -> None:
        if job.launch.rank == 0:
            print(line, flush=True)

    last_step = min(arguments.train_iters or job.packs.steps, job.packs.steps)
    if job.launch.rank == 0:
        arguments.save.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(
        job.plan, links, optimization_options(arguments), steps=job.packs.steps, seed=arguments.seed
    )
    if arguments.skip_train:
        step = load_weights(arguments.load, job.plan, trainer.stage)
    else:
        step = train_plan(job, trainer, arguments, last_step, say)
    if job.heldout_data is not None:
        evaluate_heldout(job, trainer, arguments, step, say)
    shut_down_distributed()


def train_plan(
    job: Job,
    trainer: Trainer,
    arguments: argparse.Namespace,
    last_step: int,
    say: Callable[[str], None],
) -> int:
    """Train from the start or from --load to `last_step`; returns the steps then trained."""
    first_step = 0
    if arguments.load is not None:
        first_step = load_checkpoint(
            arguments.load,
            job.plan,
            trainer.stage,
            trainer.optimizer,
            trainer.scheduler,
            asdict(trainer.options),
        )
        say(f"resuming {arguments.load} after step {first_step}")
    elif job.launch.rank == 0:
        # Steps of a run that never reached a checkpoint would mix with this one's.
        (arguments.save / RUN_FILE).unlink(missing_ok=True)
    if job.launch.rank == 0:
        info = RunInfo(model=job.plan.model.name, packs_sha256=job.plan.data.packs_sha256)
        write_run_info(info, arguments.save)
    dataset = PackDataset(
        SampleReader(job.training_data, job.tokenizer, job.plan.model),
        job.packs,
        job.lengths,
        own_rows(job.packs, first_step),
        job.plan.stages[trainer.links.rank],
    )
    train(
        trainer,
        job.packs,
        load_batches(dataset, arguments.num_workers, current_device()),
        first_step,
        RunOptions(save=arguments.save, save_interval=arguments.save_interval, last_step=last_step),
        say,
    )
    return max(first_step, last_step)


def evaluate_heldout(
    job: Job,
    trainer: Trainer,
    arguments: argparse.Namespace,
    step: int,
    say: Callable[[str], None],
) -> None:
    """Answer held-out questions; accuracy by kind goes into evaluation.json."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=job.launch.rank != 0) as progress:
        task = progress.add_task("answering held-out questions", total=None)
        evaluation = evaluate(
            trainer.model,
            trainer.links,
            job.plan,
            job.plan.data.caps,
            SampleReader(job.heldout_data, job.tokenizer, job.plan.model),
            step,
            EvaluationOptions(
                samples=arguments.eval_samples, max_new_tokens=arguments.max_new_tokens
            ),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if job.launch.rank == 0:
        say(f"wrote {write_evaluation(evaluation, arguments.save)}")


def optimization_options(arguments: argparse.Namespace) -> OptimizationOptions:
    """The optimizer's share of the command line."""
    names = [field.name for field in fields(OptimizationOptions)]
    return OptimizationOptions(**{name: vars(arguments)[name] for name in names})


def main() -> None:
    launch = Launch.from_environment()
    try:
        arguments = parse_arguments()
        job = load_job(arguments, launch)
    except UserError as error:
        # All processes of a node see the same files and fail alike: one of them speaks.
        if launch.local_rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    try:
        run_job(job, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # Not sys.exit: ending the interpreter would wait for transfers that never come.
        os._exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
