"""Rates of this device by shape: matrix products, collectives and a copy, for `omnibal profile`.

Sizes are from `omnibal.cost.measured_sizes`. Neighbouring groups of equal size run concurrently, as
tensor-parallel groups do in training. Shapes: M rows, K inner, N outer; E elements of a buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.model.configs import parameter_dtype
from megatron.vlm.step.clock import elapsed_ms, record_moment
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.model.config import Precision
from omnibal.model.rate_tables import CollectiveKind, CollectiveTime, CopyTime, ProductTime, Rates

_COLLECTIVES: tuple[CollectiveKind, ...] = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
)
_COPY_BYTES = 1 << 27  # bytes read and written by a copy: larger than any cache
_TIMED_ROUNDS = 5  # the median counts
_MIN_TIMED_MS, _MAX_CALLS = 1.0, 50  # a round's duration, unless it needs too many calls
# Collectives that training overlaps with computation: weight gathers and gradient scatters.
_OVERLAPPED: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
_OVERLAP_ROWS = 256  # small products, so that a number of them has nearly any duration
_OVERLAP_LENGTH = 4  # products last 4 collectives: a model's unit is mostly longer too
_OVERLAP_ROUNDS = 9  # more rounds: a difference of two times scatters more than a time


def measure_rates(
    device: str, precision: Precision, sizes: MeasuredSizes, progress: Console
) -> Rates:
    """Measure this device, averaged over processes; collective.

    Returns:
        Rates, without collectives for one process.
    """
    dtype = parameter_dtype(precision)
    points = list(product(sizes.rows, sizes.inner, sizes.outer))
    # Half of the bytes are read and half are written.
    source_E = torch.zeros(_COPY_BYTES // 2, dtype=torch.uint8, device=current_device())
    copy = partial(torch.empty_like(source_E).copy_, source_E)
    shown = track(
        points, "measuring matrix products", console=progress, disable=dist.get_rank() != 0
    )
    return Rates(
        device=device,
        products=tuple(
            ProductTime(rows=m, inner=k, outer=n, ms=mean_ms([_time_product(m, k, n, dtype)]))
            for m, k, n in shown
        ),
        collectives=tuple(_time_collectives(sizes.collective_bytes, dtype)),
        copies=(CopyTime(bytes=_COPY_BYTES, ms=mean_ms([_median_ms(copy)])),),
        hidden=_hidden_share(max(sizes.collective_bytes), dtype),
    )


def _time_product(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    input_MK = torch.randn(m, k, device=current_device(), dtype=dtype)
    weight_NK = torch.randn(n, k, device=current_device(), dtype=dtype)
    output_MN = torch.empty(m, n, device=current_device(), dtype=dtype)
    # [N, K] and transposed, as a linear's weight is stored.
    return _median_ms(lambda: torch.mm(input_MK, weight_NK.t(), out=output_MN))


def _time_collectives(sizes: Sequence[int], dtype: torch.dtype) -> Iterator[CollectiveTime]:
    for ranks in collective_group_sizes(dist.get_world_size()):
        # Neighbouring ranks. The last ranks have no group if `ranks` does not divide the job.
        firsts = range(0, dist.get_world_size() - ranks + 1, ranks)
        groups = [list(range(first, first + ranks)) for first in firsts]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        for kind, size in product(_COLLECTIVES, sizes):
            own_ms = []
            if group is not None:
                buffer_E = torch.zeros(size // dtype.itemsize, device=current_device(), dtype=dtype)
                begin = _prepare_collective(kind, buffer_E, ranks, group)
                own_ms = [_median_ms(partial(_run_collective, begin), group)]
            yield CollectiveTime(kind=kind, ranks=ranks, bytes=size, ms=mean_ms(own_ms))


def collective_group_sizes(processes: int) -> list[int]:
    """Return the group sizes to measure: powers of two, and all processes."""
    powers = [2**exponent for exponent in range(1, processes.bit_length())]
    return sorted({*powers, processes} - {1})


def _prepare_collective(
    kind: CollectiveKind, whole_E: torch.Tensor, ranks: int, group: dist.ProcessGroup
) -> Callable[[], dist.Work]:
    """Return a function that starts the collective on preallocated buffers."""
    share_E = whole_E[: len(whole_E) // ranks].clone()  # [E / ranks]
    begin: Callable[..., dist.Work]
    match kind:
        case "all_reduce":
            begin = partial(dist.all_reduce, whole_E)
        case "all_gather":
            begin = partial(dist.all_gather_into_tensor, whole_E, share_E)
        case "reduce_scatter":
            begin = partial(dist.reduce_scatter_tensor, share_E, whole_E)
        case _:
            begin = partial(dist.all_to_all_single, torch.empty_like(whole_E), whole_E)
    return partial(begin, group=group, async_op=True)


def _hidden_share(size: int, dtype: torch.dtype) -> float | None:
    """Return the share of a collective hidden by longer computation, or None for one process."""
    if dist.get_world_size() == 1:
        return None
    times = [_time_overlap(kind, size, dtype) for kind in _OVERLAPPED]
    exchange_ms, compute_ms, both_ms = np.sum(times, axis=0).tolist()
    # 1 if the overlap takes as long as the computation, 0 if it takes the sum.
    return float(np.clip((exchange_ms + compute_ms - both_ms) / exchange_ms, 0, 1))


def _run_collective(begin: Callable[[], dist.Work]) -> None:
    begin().wait()


def _time_overlap(kind: CollectiveKind, size: int, dtype: torch.dtype) -> list[float]:
    """Return the times of a collective of all processes, of longer products, and of both."""
    whole_E = torch.zeros(size // dtype.itemsize, device=current_device(), dtype=dtype)
    begin = _prepare_collective(kind, whole_E, dist.get_world_size(), dist.group.WORLD)
    factor_MM = torch.randn(_OVERLAP_ROWS, _OVERLAP_ROWS, device=current_device(), dtype=dtype)
    product_MM = torch.empty_like(factor_MM)

    def compute(calls: int) -> None:
        for _ in range(calls):
            torch.mm(factor_MM, factor_MM, out=product_MM)

    def overlap(calls: int) -> None:
        work = begin()
        compute(calls)
        work.wait()

    def aligned_ms(work: Callable[[], object]) -> float:
        dist.barrier()  # else a round would also time the processes' different starts
        return timed_ms(work)

    product_ms = mean_ms([_median_ms(partial(compute, 1))])
    exchange_ms = mean_ms([_median_ms(partial(overlap, 0), dist.group.WORLD)])
    # A mean over processes, so that all run equally many products.
    calls = max(round(_OVERLAP_LENGTH * exchange_ms / product_ms), 1)
    works = (partial(overlap, 0), partial(compute, calls), partial(overlap, calls))
    rounds = [[aligned_ms(work) for work in works] for _ in range(_OVERLAP_ROUNDS)]
    return [mean_ms([float(time_ms)]) for time_ms in np.median(rounds, axis=0)]


def _median_ms(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Return the median time of a call, over rounds long enough to time."""
    work()
    first_ms = timed_ms(work)
    if group is not None:
        # Ranks of a collective must make equally many calls, so they derive them from one sum.
        [first_ms] = sum_over_ranks([first_ms], group)
    calls = min(max(int(_MIN_TIMED_MS / max(first_ms, 1e-6)), 1), _MAX_CALLS)
    return float(np.median([timed_ms(work, calls) for _ in range(_TIMED_ROUNDS)]))


def timed_ms(work: Callable[[], object], calls: int = 1) -> float:
    """Return the mean time of a call over `calls` consecutive calls."""
    start = record_moment()
    for _ in range(calls):
        work()
    end = record_moment()
    if has_cuda():
        torch.cuda.synchronize()  # CUDA events have times once the device has passed them
    return max(elapsed_ms(start, end), 1e-6) / calls


def mean_ms(own_ms: Sequence[float]) -> float:
    """Return the mean over processes; collective. A process may give no times."""
    # Not the maximum: maxima of noisy times would sum to more than a step.
    sum_ms, count = sum_over_ranks([sum(own_ms), len(own_ms)])
    return sum_ms / count


def sum_over_ranks(own: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the sum of each number over the group's ranks, or over all; collective."""
    total = torch.tensor(own, dtype=torch.float64, device=current_device())
    dist.all_reduce(total, group=group)
    sums: list[float] = total.tolist()
    return sums
