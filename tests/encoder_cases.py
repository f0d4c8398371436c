"""Settings of data-parallel encoders."""

from omnibal.model.data_parallel_encoders import DataParallelEncoders


def choice_of(pipelines: int, a_pass: int, kept: dict[str, int], **others) -> DataParallelEncoders:
    """Return a choice with equal passes of all encoders; items take 1 ms."""
    of_all = {"items_per_pass": dict.fromkeys(kept, a_pass), "item_ms": dict.fromkeys(kept, 1.0)}
    return DataParallelEncoders(pipelines=pipelines, kept_items=kept, **(of_all | others))
