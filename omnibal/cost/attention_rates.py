"""Times of attention of any lengths and heads, from those that were measured.

A kernel takes a constant and so much an operation. Operations are of whole tiles of `TILE` keys, of
which a query leaves half of one empty, so that short samples are slower an operation: of a causal
sample of s tokens, a multiple of s^2 + 128 s, linear in the features of a pack. (A free term in s,
fitted to the B200's backward with heads of 192, is 127 tokens.) Constant and operation are fitted
by least relative error for each pass and size of heads, over lengths and numbers of heads together.
Where all samples are of one length, as a launch line's made-up ones, the line is scaled to what was
measured at that length, and between lengths in proportion to their logarithms: long samples run
slower an operation than ones of 32,768 tokens, as clocks fall. Sizes that were not measured take
those of the nearest, and as many operations as they have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from omnibal.cost.shaped_rates import Line, fitted_line
from omnibal.model.rates import AttentionTime

TILE = 128
"""Keys of a tile (FlashAttention-2, arXiv 2307.08691, section 3.3, has blocks of 64 or 128)."""

AttentionPass = Literal["forward", "backward"]


_Kernel = tuple[AttentionPass, bool, int]
"""What kernels are told apart by: pass, whether causal, and elements of q and k of a head and of
v."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fit:
    """Time of a kernel by operations, and how far it is off at each measured length."""

    line: Line
    log_tokens: np.ndarray
    """Logarithms of measured lengths, ascending."""
    log_errors: np.ndarray
    """Logarithms of measured over fitted time at each, on average."""

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, int]]) -> Self:
        """Fit to operations, time and length of measurements."""
        flops, times_ms, tokens = np.array(points).T
        lengths, index, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        # Where sizes are alike, a fit alone may find that operations cost nothing.
        least_ms = float((times_ms / flops).min()) / 2
        line = fitted_line(flops, times_ms, 1 / times_ms, least_ms=least_ms)
        errors = np.log(times_ms / (line.fixed_ms + line.each_ms * flops))
        log_errors = np.bincount(index, errors) / counts
        return cls(line=line, log_tokens=np.log(lengths), log_errors=log_errors)

    def at(self, tokens: int | None) -> Line:
        """The line, where all samples have so many tokens exact for that length on average."""
        if tokens is None:
            return self.line
        off = math.exp(np.interp(math.log(tokens), self.log_tokens, self.log_errors))
        return Line(fixed_ms=self.line.fixed_ms * off, each_ms=self.line.each_ms * off)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTimes:
    """Times of kernels of attention."""

    fits: dict[_Kernel, _Fit]
    """Time by operations, whole tiles' included."""

    @classmethod
    def of(cls, measured: Sequence[AttentionTime], tflops: float | None = None) -> Self:
        """Times from measurements, whose shares are of `tflops`."""
        kernels: dict[_Kernel, list[tuple[float, float, int]]] = {}
        for one in measured:
            kernel = one.of, one.causal, one.head_size + one.value_size
            # A causal kernel does half of the square that is counted.
            pairs = (one.tokens / 2 if one.causal else one.tokens) + TILE / 2
            point = (one.flops * pairs / one.tokens, one.time_ms(tflops), one.tokens)
            kernels.setdefault(kernel, []).append(point)
        return cls(fits={kernel: _Fit.of(points) for kernel, points in kernels.items()})

    def line(
        self, of: AttentionPass, elements: float, *, causal: bool, tokens: int | None = None
    ) -> Line:
        """Time of a kernel by operations of whole tiles, of backward 2.5 times forward's.

        Args:
            elements: of q and k of a head, and of v.
            tokens: of every sample, where all are alike; None for samples of any length.
        """
        nearest = min(
            self.fits,
            key=lambda one: (one[0] != of, one[1] != causal, abs(math.log(one[2] / elements))),
        )
        return self.fits[nearest].at(tokens)
