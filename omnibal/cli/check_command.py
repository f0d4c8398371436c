"""`omnibal check`: validate a plan directory."""

from omnibal.cli.console import print_result
from omnibal.cli.options import DirectoryArgument, JsonOption


def check(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Validate a plan directory: recompute its packs, counts and memory."""
    from omnibal.job.check import check_and_open, training_obstacles
    from omnibal.pipeline.loader_time import slow_reading

    files, passed = check_and_open(directory)
    notes = training_obstacles(files.plan)
    if files.plan.prediction and (slow := slow_reading(files.plan.prediction)):
        notes.append(slow)
    lines = [f"ok: {sentence}" for sentence in passed] + [f"note: {note}" for note in notes]
    print_result(as_json, {"passed": passed, "notes": notes}, *lines)
