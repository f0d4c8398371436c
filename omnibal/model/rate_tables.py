"""Measured rates of a device by shape: the table `rates` of a profile or a cluster.

Times are of one device with busy neighbours. A share of the peak `tflops` may replace a time.
Tables may hold any shapes. Read by `shaped_rates` and `scattered_rates`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omnibal.base.frozen import Count, Frozen, Rate, Share, Width, written_unless

_Time = Annotated[float, Field(ge=1e-9, le=1e12)]
"""Measured time in ms, limited to keep fits finite."""
_Bytes = Annotated[int, Field(ge=1, le=2**60)]
_MS_PER_FLOP = 1e-9  # milliseconds per operation at 1 TFLOP/s

RingKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
CollectiveKind = Literal[RingKind, "all_to_all", "send"]
CopyKind = Literal["plain", "permute", "permute_backward", "cross_entropy", "fused_cross_entropy"]
Pass = Literal["forward", "input_gradient", "weight_gradient"]
GradientPrecision = Literal["fp32", "bf16"]
Place = Literal["node", "network"]


class _Timed(Frozen):
    """A measurement, written shape first."""

    @model_serializer(mode="wrap")
    def _shape_first(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return dict(sorted(fields.items(), key=lambda field: field[0] in _UNITS))


_UNITS = ("bytes", "latency_us", "gb_per_s", "ms", "share")
"""Fields with a speed. All others describe the shape."""


class _Measured(_Timed):
    """A time, or a share of the table's peak."""

    ms: _Time | None = written_unless(None)
    share: Share | None = written_unless(None)

    @property
    def flops(self) -> float:
        """Operations the share refers to."""
        raise NotImplementedError

    @property
    def max_share(self) -> float:
        """Share of a kernel at the peak."""
        return 1.0

    @model_validator(mode="after")
    def _has_one_unit(self) -> Self:
        if (self.ms is None) == (self.share is None):
            raise ValueError("a measurement needs either ms or share, one of the two")
        return self

    def time_ms(self, tflops: float | None) -> float:
        """Time, with shares of `tflops`."""
        if self.ms is not None:
            return self.ms
        assert self.share is not None and tflops is not None, "Rates refuses shares without a peak"
        return self.flops / (self.share * tflops) * _MS_PER_FLOP

    def scaled(self, tflops: float, scale: float, most: float = 1.0) -> Self:
        """Return the measurement with `scale` times its share of `tflops`.

        `most`: largest share of operations that are done.
        """
        share = self.share or self.flops / self.time_ms(tflops) / tflops * _MS_PER_FLOP
        share = min(share * scale, most * self.max_share)
        return self.model_copy(update={"ms": None, "share": share})


class ProductTime(_Measured):
    """One matrix product of a linear layer of `inner` inputs and `outer` outputs.

    Forward: [rows, inner] by [inner, outer]. Input gradient: [rows, outer] by [outer, inner].
    Weight gradient: [inner, rows] by [rows, outer], accumulated.
    """

    rows: Width
    inner: Width
    outer: Width
    of: Pass = written_unless("forward")
    gradient: GradientPrecision = written_unless("fp32")
    """Precision of the accumulated weight gradient."""

    @property
    def flops(self) -> float:
        """Operations: 2 x rows x inner x outer."""
        return 2.0 * self.rows * self.inner * self.outer


class GroupedTime(ProductTime):
    """A grouped product of `groups` with `rows` each, as for experts."""

    groups: Count

    @property
    def flops(self) -> float:
        """Operations of all groups."""
        return self.groups * super().flops


class AttentionTime(_Measured):
    """One attention kernel over one sample.

    Shares count the full square even for causal kernels, so up to 2: 2 tokens^2 operations per head
    and element of `head_size` (q k^T) and `value_size`; backward 2.5 times forward.
    """

    share: Annotated[float, Field(ge=1e-9, le=2)] | None = written_unless(None)
    tokens: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    value_size: Count
    of: Literal["forward", "backward"] = "forward"
    causal: bool = written_unless(True)
    packed: bool = written_unless(False)  # whether q, k and v are views of one tensor

    @property
    def flops(self) -> float:
        """Operations of the full square."""
        passes = 1.0 if self.of == "forward" else 2.5
        return passes * 2 * self.heads * (self.head_size + self.value_size) * self.tokens**2.0

    @property
    def max_share(self) -> float:
        """Share of a kernel at the peak; a causal one does half of what is counted."""
        return 2.0 if self.causal else 1.0


class _Moved(_Timed):
    """Bytes and their time, or a latency and a rate."""

    bytes: _Bytes | None = written_unless(None)
    ms: _Time | None = written_unless(None)
    latency_us: Annotated[float, Field(ge=0, le=1e9)] | None = written_unless(None)
    gb_per_s: Rate | None = written_unless(None)

    @model_validator(mode="after")
    def _is_point_or_line(self) -> Self:
        given = {name for name, value in self if name in _UNITS and value is not None}
        if given not in ({"bytes", "ms"}, {"latency_us", "gb_per_s"}):
            raise ValueError(
                "a measurement needs bytes and ms, or latency_us and gb_per_s "
                f"(given: {', '.join(sorted(given)) or 'none of them'})"
            )
        return self


class CollectiveTime(_Moved):
    """One collective of `ranks` neighbouring ranks, or one send between two.

    `bytes` is the full tensor. `gb_per_s` counts bytes sent per rank (bus bandwidth): all in a
    send, (ranks - 1) / ranks of the tensor otherwise, twice that in an all-reduce.
    """

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2, le=1_024)]
    place: Place = written_unless("node")  # whether the ranks are within a node or on one node each


class CopyTime(_Moved):
    """One copy within device memory; `bytes` are read plus written."""

    kind: CopyKind = written_unless("plain")

    @property
    def latency_ms(self) -> float | None:
        """Latency, or None if included in the time."""
        return None if self.latency_us is None else self.latency_us / 1e3

    @property
    def bytes_per_ms(self) -> float:
        """Rate of the copy, without latency if known."""
        if self.ms is not None:
            assert self.bytes is not None
            return self.bytes / self.ms
        assert self.gb_per_s is not None
        return self.gb_per_s * 1e6


class ScaledRates(Frozen):
    """Rate tables of another cluster, with factors for the shares of peak reached."""

    cluster: str
    products: Rate = 1.0
    grouped: Rate = 1.0
    attention: Rate = 1.0
    attention_most: tuple[Share, Share] = (1.0, 1.0)
    """Largest shares of peak that attention reaches, forward and backward."""


class Rates(Frozen):
    """Measurements of one device in one precision, all optional."""

    device: str
    tflops: Rate | None = written_unless(None)  # peak that shares refer to
    products: tuple[ProductTime, ...] = ()
    grouped: tuple[GroupedTime, ...] = written_unless(())
    attention: tuple[AttentionTime, ...] = written_unless(())
    collectives: tuple[CollectiveTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    hidden: Annotated[float, Field(ge=0, le=1)] | None = written_unless(None)
    """Hidden share of a collective under a longer computation: 1 fully hidden, 0 sequential."""

    @property
    def _measured(self) -> dict[str, Sequence[_Measured]]:
        """Computation times by table name."""
        tables = {"products": self.products, "grouped": self.grouped}
        return {**tables, "attention": self.attention}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once, since fits are cached per object.
        return hash((self.device, self.products, self.grouped, self.attention))

    def of_peak(self, own_tflops: float, tflops: float, scales: ScaledRates) -> Self:
        """Return rates with peak `tflops` and scaled shares, without copies and collectives."""
        peak = self.tflops or own_tflops
        return self.model_copy(
            update={
                "device": f"{self.device}, scaled",
                "tflops": tflops,
                "products": tuple(time.scaled(peak, scales.products) for time in self.products),
                "grouped": tuple(time.scaled(peak, scales.grouped) for time in self.grouped),
                "attention": tuple(
                    time.scaled(
                        peak, scales.attention, scales.attention_most[time.of == "backward"]
                    )
                    for time in self.attention
                ),
                "collectives": (),
                "copies": (),
                "hidden": None,
            }
        )

    @model_validator(mode="after")
    def _shapes_are_given_once(self) -> Self:
        # Copies and collectives may repeat a size: lines are fitted through all.
        for name, given in self._measured.items():
            shapes = Counter(time.model_copy(update={"ms": None, "share": None}) for time in given)
            for shape, times in shapes.items():
                if times > 1:
                    sizes = ", ".join(f"{key} {value}" for key, value in shape.model_dump().items())
                    raise ValueError(f"{name}: {sizes} is given {times} times; keep one of them")
        return self

    @model_validator(mode="after")
    def _shares_have_a_peak(self) -> Self:
        shares = any(time.share is not None for given in self._measured.values() for time in given)
        if shares and self.tflops is None:
            raise ValueError(
                "shares are given without the peak that they are of; add tflops, or give ms"
            )
        return self
