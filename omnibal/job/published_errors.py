"""Errors of predictions by kind of job, on published steps that no constant was fitted to.

`scripts/reproduce/measured_gpus.py --write-errors` makes `presets/published_errors.toml`.
"""

import re
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from omnibal.base.files import read_toml_model
from omnibal.base.frozen import Count, Frozen
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig
from omnibal.model.levels import largest_caps
from omnibal.model.parallel import Parallel, expert_counts

ERRORS_FILE = Path(__file__).parents[1] / "presets" / "published_errors.toml"
LONG_TOKENS = 32_768  # min tokens per sample of a long-context job
SMALL_TOKENS = 4096  # max tokens of a small micro-batch
_DEVICE = re.compile(r"\b(?:GB|[ABHLV])\d{2,3}\b")


class JobKind(StrEnum):
    """Kinds of jobs whose prediction errors are reported separately."""

    ADAPTERS = "adapters and fine-tuning"
    SHARDED = "sharded weights"
    VISION_LANGUAGE = "vision-language"
    EXPERTS = "experts"
    LONG_CONTEXT = "long context"
    DENSE = "dense"


class PublishedErrors(Frozen):
    """Predicted over measured step time, minus 1, of one kind of published jobs on a device."""

    kind: JobKind
    device: str
    small: bool  # whether micro-batches have at most `SMALL_TOKENS` tokens
    steps: Count
    median: float  # median of absolute errors
    least: float  # signed, below 0 if predicted too fast
    most: float

    def __str__(self) -> str:
        return (
            f"{self.median:.0%} median, {self.least:+.0%} to {self.most:+.0%} of {self.steps} "
            f"published steps of {self.kind} on {self.device}"
        )


@lru_cache(maxsize=1)
def _read_errors() -> tuple[PublishedErrors, ...]:
    tables = dict[str, tuple[PublishedErrors, ...]]
    return read_toml_model(tables, ERRORS_FILE, "install omnibal again")["errors"]


def device_name(cluster: ClusterConfig) -> str:
    """Return the short name of a cluster's devices, such as "H100", or the full one."""
    match = _DEVICE.search(cluster.device)
    return match[0] if match else cluster.device


def job_kind(
    model: ModelConfig,
    parallel: Parallel,
    adapters: AdapterConfig | None,
    sample_tokens: int,
    *,
    has_images: bool,
) -> JobKind:
    """Return the kind of a job, given the tokens of its longest sample."""
    # A job may be of several kinds; the first, rarest one is its kind.
    holds = {
        JobKind.ADAPTERS: adapters is not None,
        JobKind.SHARDED: parallel.sharded > 1,
        JobKind.VISION_LANGUAGE: bool(model.encoders) and has_images,
        JobKind.LONG_CONTEXT: sample_tokens >= LONG_TOKENS,
        JobKind.EXPERTS: bool(expert_counts(model)),
    }
    return next((kind for kind, is_so in holds.items() if is_so), JobKind.DENSE)


def published_errors(
    kind: JobKind, cluster: ClusterConfig, micro_batch_tokens: float
) -> PublishedErrors | None:
    """Return errors of a kind, preferably on this device and of this size; None if unknown."""
    device, small = device_name(cluster), micro_batch_tokens <= SMALL_TOKENS
    return min(
        (errors for errors in _read_errors() if errors.kind is kind),
        key=lambda errors: (errors.device != device, errors.small != small, -errors.steps),
        default=None,
    )


def errors_of_plan(plan: Plan) -> PublishedErrors | str:
    """Return errors of published jobs of the plan's kind, or the reason for none as text."""
    if plan.prediction is not None and plan.prediction.cost_source.startswith("profile:"):
        return "costs were measured here"
    caps = largest_caps(plan.pack_levels)
    kind = job_kind(
        plan.model,
        plan.parallel,
        plan.adapters,
        caps["tokens"] if plan.has_shared_packs else 0,
        has_images=True,
    )
    errors = published_errors(kind, plan.cluster, caps["tokens"])
    return errors or f"no published step of {kind} is known"
