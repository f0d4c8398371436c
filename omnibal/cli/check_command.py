"""`omnibal check`: prove that training can follow a plan."""

from omnibal.cli.console import print_result
from omnibal.cli.options import DirectoryArgument, JsonOption


def check(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Prove that training can follow a plan, or say why not."""
    from omnibal.job.check import check_and_open, training_obstacles
    from omnibal.pipeline.loader_time import slow_reading

    files, passed = check_and_open(directory)
    notes = training_obstacles(files.plan)
    slow = slow_reading(files.plan.prediction) if files.plan.prediction else None
    notes += [slow] if slow else []
    lines = [f"ok: {sentence}" for sentence in passed] + [f"note: {note}" for note in notes]
    print_result(as_json, {"passed": passed, "notes": notes}, *lines)
