"""Exchange of sharded weights next to computation, one event at a time."""

from collections.abc import Sequence


def simulated_ms(
    compute_ms: Sequence[float], gather_ms: Sequence[float], reduce_ms: Sequence[float]
) -> float:
    """Return the time of units run in order, with one link that gathers one unit ahead and then
    reduces the previous unit."""
    link_ms, compute_end = gather_ms[0], 0.0
    ready = [link_ms]
    for unit, own_ms in enumerate(compute_ms):
        start = max(compute_end, ready[unit])
        link_ms = max(link_ms, start)
        if unit + 1 < len(compute_ms):
            link_ms += gather_ms[unit + 1]
        if unit:
            link_ms += reduce_ms[unit - 1]
        ready.append(link_ms)
        compute_end = start + own_ms
    return max(compute_end, link_ms) + reduce_ms[-1]
