"""Train a vision-language or language model by an OmniBal plan.

    torchrun --nproc-per-node 2 pretrain_vlm.py --plan PLAN --data META.json \
        --tokenizer-model tokenizer.model --save RUN

Parses the command line, loads the plan, checks that plan, launch and data agree, and trains.
"""

import sys

from rich.console import Console

from megatron.vlm.run.arguments import parse_arguments
from megatron.vlm.run.dry_run import print_dry_run
from megatron.vlm.run.launch import RankLaunch, open_store
from megatron.vlm.run.log import show_log
from megatron.vlm.run.pretrain import (
    execute,
    load_run,
    open_trainable,
    plan_for_all,
    plan_to_train,
    resume_elastic,
)
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.printable import printable
from omnibal.job.runlog import latest_step


def main() -> None:
    """Train as one rank of the plan given on the command line."""
    launch = RankLaunch.from_environment()
    show_log(launch.rank)
    try:
        plan, given = parse_arguments()
        if given is None:  # --dry-run
            planned = open_trainable(plan)
            if launch.rank == 0:
                print_dry_run(planned.plan, Console())
            return
        arguments, store = resume_elastic(given), None
        directory = plan_to_train(plan, arguments, launch)
        if arguments.checkpoints.elastic:
            store = open_store(launch, start=f"{latest_step(arguments.save)} {launch.world_size}")
            directory = plan_for_all(directory, arguments, launch, store)
        run = load_run(arguments, open_trainable(directory), launch)
        store = store or open_store(launch)
    except UserError as error:
        # All processes of a node read the same files and fail alike: one prints.
        if launch.local_rank == 0:
            print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    execute(run, store)


if __name__ == "__main__":
    main()
