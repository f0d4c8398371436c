"""Rates of this device by shape: matrix products, collectives and a copy, for `omnibal profile`.

Sizes are from `omnibal.cost.measured_sizes`. All neighbouring groups of a size run at once, as
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
from megatron.vlm.step.clock import elapsed_ms, moment
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.model.config import Precision
from omnibal.model.rate_tables import CollectiveKind, CollectiveTime, CopyTime, ProductTime, Rates

_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_COPY_BYTES = 1 << 27
"""Bytes read and written by a copy: larger than any cache."""
_BESIDE_COMPUTATION: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
"""Kinds that overlap with computation in training: gathers of weights, scatters of gradients."""
_BESIDE_ROWS = 256
"""Size of the products that overlap with a collective: short, so that any duration can be built."""
_BESIDE_LENGTH = 4
"""Duration of the products relative to the collective. A model's unit is mostly longer too."""
_BESIDE_ROUNDS = 9
"""Timed rounds of collective, products and both: more, as differences scatter more than times."""
_ROUNDS = 5
"""Timed rounds of everything. The median counts."""
_BATCH_MS, _MOST_CALLS = 1.0, 50
"""Calls are repeated until they take `_BATCH_MS`, at most `_MOST_CALLS` times."""


def measure_rates(
    device: str, precision: Precision, sizes: MeasuredSizes, progress: Console
) -> Rates:
    """Measure this device: means over processes; collective. No collectives for one process."""
    dtype = parameter_dtype(precision)
    points = list(product(sizes.rows, sizes.inner, sizes.outer))
    source_E = torch.zeros(_COPY_BYTES // 2, dtype=torch.uint8, device=current_device())
    copy = partial(torch.empty_like(source_E).copy_, source_E)
    shown = track(
        points, "measuring matrix products", console=progress, disable=dist.get_rank() != 0
    )
    return Rates(
        device=device,
        products=tuple(
            ProductTime(rows=m, inner=k, outer=n, ms=mean_ms([_product_ms(m, k, n, dtype)]))
            for m, k, n in shown
        ),
        collectives=tuple(_collectives(sizes.collective_bytes, dtype)),
        copies=(CopyTime(bytes=_COPY_BYTES, ms=mean_ms([_typical_ms(copy)])),),
        hidden=_hidden_share(max(sizes.collective_bytes), dtype),
    )


def _product_ms(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    """Time of a linear layer's forward product."""
    input_MK = torch.randn(m, k, device=current_device(), dtype=dtype)
    weight_NK = torch.randn(n, k, device=current_device(), dtype=dtype)
    output_MN = torch.empty(m, n, device=current_device(), dtype=dtype)
    return _typical_ms(lambda: torch.mm(input_MK, weight_NK.t(), out=output_MN))


def _collectives(sizes: Sequence[int], dtype: torch.dtype) -> Iterator[CollectiveTime]:
    """Time every kind in groups of every size, all groups of a size concurrently."""
    for ranks in group_sizes(dist.get_world_size()):
        # Neighbouring ranks. None for ranks that are left over.
        firsts = range(0, dist.get_world_size() - ranks + 1, ranks)
        groups = [list(range(first, first + ranks)) for first in firsts]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        for kind, size in product(_KINDS, sizes):
            own_ms = []
            if group is not None:
                buffer_E = torch.zeros(size // dtype.itemsize, device=current_device(), dtype=dtype)
                begin = _collective(kind, buffer_E, ranks, group)
                own_ms = [_typical_ms(partial(_run_collective, begin), together=group)]
            yield CollectiveTime(kind=kind, ranks=ranks, bytes=size, ms=mean_ms(own_ms))


def group_sizes(processes: int) -> list[int]:
    """Group sizes to measure: powers of two, and all processes."""
    powers = [2**exponent for exponent in range(1, processes.bit_length())]
    return sorted({*powers, processes} - {1})


def _collective(
    kind: CollectiveKind, whole_E: torch.Tensor, ranks: int, group: dist.ProcessGroup
) -> Callable[[], dist.Work]:
    """Return a function that starts the collective."""
    share_E = whole_E[: len(whole_E) // ranks].clone()
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
    """Hidden share of a collective in longer computation (`Rates.hidden`). None for one process."""
    if dist.get_world_size() == 1:
        return None
    times = [_times_beside(kind, size, dtype) for kind in _BESIDE_COMPUTATION]
    exchange_ms, compute_ms, both_ms = np.sum(times, axis=0).tolist()
    return float(np.clip((exchange_ms + compute_ms - both_ms) / exchange_ms, 0, 1))


def _times_beside(kind: CollectiveKind, size: int, dtype: torch.dtype) -> list[float]:
    """Times of a collective of all processes, of longer products, and of both at once."""
    whole_E = torch.zeros(size // dtype.itemsize, device=current_device(), dtype=dtype)
    begin = _collective(kind, whole_E, dist.get_world_size(), dist.group.WORLD)
    factor_MM = torch.randn(_BESIDE_ROWS, _BESIDE_ROWS, device=current_device(), dtype=dtype)
    product_MM = torch.empty_like(factor_MM)

    def compute(calls: int) -> None:
        for _ in range(calls):
            torch.mm(factor_MM, factor_MM, out=product_MM)

    def both(calls: int) -> None:
        work = begin()
        compute(calls)
        work.wait()

    once_ms = mean_ms([_typical_ms(partial(compute, 1))])
    exchange_ms = mean_ms([_typical_ms(partial(both, 0), together=dist.group.WORLD)])
    calls = max(round(_BESIDE_LENGTH * exchange_ms / once_ms), 1)

    def together_ms(work: Callable[[], object]) -> float:
        dist.barrier()
        return timed_ms(work)

    works = (partial(both, 0), partial(compute, calls), partial(both, calls))
    rounds = [[together_ms(work) for work in works] for _ in range(_BESIDE_ROUNDS)]
    return [mean_ms([float(time_ms)]) for time_ms in np.median(rounds, axis=0)]


def _run_collective(begin: Callable[[], dist.Work]) -> None:
    begin().wait()


def _typical_ms(work: Callable[[], object], together: dist.ProcessGroup | None = None) -> float:
    """Median time of a call, over rounds long enough to time."""
    work()
    first_ms = torch.tensor(timed_ms(work))
    if together is not None:
        first_ms = first_ms.to(current_device())
        dist.all_reduce(first_ms, group=together)
    calls = min(max(int(_BATCH_MS / max(first_ms.item(), 1e-6)), 1), _MOST_CALLS)
    return float(np.median([timed_ms(work, calls) for _ in range(_ROUNDS)]))


def timed_ms(work: Callable[[], object], calls: int = 1) -> float:
    """Mean time of a call over `calls` in a row, in ms."""
    start = moment()
    for _ in range(calls):
        work()
    end = moment()
    if has_cuda():
        torch.cuda.synchronize()
    return max(elapsed_ms(start, end), 1e-6) / calls


def mean_ms(own_ms: Sequence[float]) -> float:
    """Mean over processes; collective. Maxima of noisy times would sum to more than a step."""
    given = [sum(own_ms), float(len(own_ms))]
    total = torch.tensor(given, dtype=torch.float64, device=current_device())
    dist.all_reduce(total)
    sum_ms, count = total.tolist()
    return float(sum_ms / count)
