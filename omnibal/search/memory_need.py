"""Min memory per device that a job needs, over all splits with any layers recomputed."""

import math

from omnibal.job.job import JobSpec
from omnibal.job.planner import PlanRequest, placement_problem
from omnibal.model.levels import are_plain
from omnibal.model.units import unit_names
from omnibal.pipeline.encoder_search import min_peak_with_encoders
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.stage_memory import GIB, state_bytes

_GIB_DIGITS = 3  # significant digits of GiB


def least_need_gib(request: PlanRequest, *, is_exact: bool = True) -> float:
    """Return the min peak in GiB of the fullest device, over splits, recompute and encoder choices.

    Args:
        is_exact: False to decide only whether the memory cap suffices. May then return an upper
            bound within the cap on the peak of some split, or else a lower bound on all peaks.
    """
    job, workload, levels = request.job, request.workload(), request.data.levels
    if job.has_data_parallel_encoders and job.data_parallel_encoders is None:
        return min_peak_with_encoders(placement_problem(job, workload, levels))[0] / GIB
    is_exact = is_exact or not are_plain(levels)
    return min_peak_of_splits(job.split_task(workload, levels), is_exact=is_exact) / GIB


def least_state_gib(job: JobSpec) -> float:
    """Return weights, gradients and optimizer state in GiB per device, mean over stages."""
    units = [job.cost.units[name] for name in unit_names(job.pipeline_model)]
    of_units = sum(float(state_bytes(job.cost, unit).sum()) for unit in units)  # tied matrix twice
    return (of_units - float(state_bytes(job.cost).sum())) / job.parallel.pipeline / GIB


def gib_text(gib: float) -> str:
    """Format GiB with three significant digits, or more from 1,000 on.

    Example:
        >>> gib_text(125.06), gib_text(72.0), gib_text(0.00123)
        ('125', '72.0', '0.00123')
    """
    decimals = _GIB_DIGITS - 1 - math.floor(math.log10(gib)) if gib > 0 else 0
    return f"{gib:,.{max(decimals, 0)}f}"
