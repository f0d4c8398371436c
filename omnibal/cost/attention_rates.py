"""Attention times for any lengths and heads, fitted to measurements.

Per pass and head size, time is a constant plus a rate of operations in full tiles of `TILE` keys
(half a tile per query is padding), i.e. s^2 + 128 s for a causal sample of s tokens. (A free linear
term fitted to the B200's backward with heads of 192 gives 127.) The fit minimises relative error
over all lengths and head counts. If all samples have one length, it is scaled to the measurement at
that length, interpolated by logarithm. Unmeasured head sizes use the nearest measured size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from omnibal.cost.shaped_rates import Line, fitted_line
from omnibal.model.rates import AttentionTime

TILE = 128
"""Keys of a tile (FlashAttention-2, arXiv 2307.08691, section 3.3, has blocks of 64 or 128)."""

AttentionPass = Literal["forward", "backward"]


_Kernel = tuple[AttentionPass, bool, int]
"""Kernel key: pass, whether causal, elements of q and k per head, and of v."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTimes:
    """Times of attention kernels."""

    points: dict[_Kernel, np.ndarray]
    """Operations in full tiles, time and length of every measurement, [measured, 3]."""

    @classmethod
    def of(cls, measured: Sequence[AttentionTime], tflops: float | None = None) -> Self:
        """Take measurements with shares of `tflops`."""
        kernels: dict[_Kernel, list[tuple[float, float, int]]] = {}
        for one in measured:
            kernel = one.of, one.causal, one.head_size + one.value_size
            # A causal kernel does half of the counted square.
            pairs = (one.tokens / 2 if one.causal else one.tokens) + TILE / 2
            point = (one.flops * pairs / one.tokens, one.time_ms(tflops), one.tokens)
            kernels.setdefault(kernel, []).append(point)
        return cls(points={kernel: np.array(points) for kernel, points in kernels.items()})

    def line(
        self, of: AttentionPass, elements: float, *, causal: bool, tokens: int | None = None
    ) -> Line:
        """Kernel time by operations in full tiles; backward has 2.5 times forward's.

        Args:
            elements: of q and k per head, and of v.
            tokens: of every sample if all are equal, else None.
        """
        nearest = min(
            self.points,
            key=lambda one: (one[0] != of, one[1] != causal, abs(math.log(one[2] / elements))),
        )
        return _line(self, nearest, tokens)


@lru_cache(maxsize=4096)
def _line(times: AttentionTimes, kernel: _Kernel, tokens: int | None) -> Line:
    flops, times_ms, measured_tokens = times.points[kernel].T
    # With equal sizes, a fit may find operations free.
    line = fitted_line(flops, times_ms, least_ms=float((times_ms / flops).min()) / 2)
    if tokens is None:
        return line
    lengths, index, counts = np.unique(measured_tokens, return_inverse=True, return_counts=True)
    errors = np.log(times_ms / (line.fixed_ms + line.each_ms * flops))
    mean_errors = np.bincount(index, errors) / counts
    off = math.exp(np.interp(math.log(tokens), np.log(lengths), mean_errors))
    return Line(fixed_ms=line.fixed_ms * off, each_ms=line.each_ms * off)
