"""Limits of one micro-batch, one step and one device."""

from omnibal.config import ClusterConfig
from omnibal.errors import UserError
from omnibal.frozen import Count, Frozen

MAX_PACKS_PER_STEP = 1_000_000
USABLE_MEMORY_FRACTION = 0.9
"""Share of device memory to plan with; the rest is for context, communication and fragmentation."""


class Caps(Frozen):
    """Largest image tiles and language tokens of one micro-batch."""

    max_tiles: Count
    max_tokens: Count


def memory_cap_gib(cluster: ClusterConfig) -> float:
    """Memory that a stage may fill of one device, in GiB."""
    return USABLE_MEMORY_FRACTION * cluster.memory_gib


def check_packs_per_step(data_parallel: int, micro_batches: int) -> None:
    """Refuse a step of more than `MAX_PACKS_PER_STEP` packs.

    Raises:
        UserError: there are too many.
    """
    count = data_parallel * micro_batches
    if count > MAX_PACKS_PER_STEP:
        raise UserError(
            f"a step of {data_parallel:,} ranks with {micro_batches:,} micro-batches each has "
            f"{count:,} packs; it may have at most {MAX_PACKS_PER_STEP:,}: give fewer "
            "micro-batches or ranks"
        )
