"""Measured times by shape: the table `rates` of a profile or a cluster.

Times are of one device with busy neighbours; a share of the peak `tflops` may replace a time.
Tables hold any shapes: `omnibal.cost.shaped_rates` and `scattered_rates` interpolate.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omnibal.base.errors import refuse_if
from omnibal.base.frozen import Count, Fraction, Frozen, Rate, Width, written_unless

_TimeMs = Annotated[float, Field(ge=1e-9, le=1e12)]  # limits keep fits finite
_MovedBytes = Annotated[int, Field(ge=1, le=2**60)]
_MS_PER_FLOP = 1e-9  # at 1 TFLOP/s

RingKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
CollectiveKind = Literal[RingKind, "all_to_all", "send"]
CopyKind = Literal["plain", "permute", "permute_backward", "cross_entropy", "fused_cross_entropy"]
ProductPass = Literal["forward", "input_gradient", "weight_gradient"]
GradientPrecision = Literal["fp32", "bf16"]
Place = Literal["node", "network"]


_SPEED_FIELDS = ("bytes", "latency_us", "gb_per_s", "ms", "share")  # others describe the shape


class _Measurement(Frozen):
    @model_serializer(mode="wrap")
    def _shape_first(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return dict(sorted(fields.items(), key=lambda field: field[0] in _SPEED_FIELDS))


class _Computation(_Measurement):
    """A time, or a share of the table's peak."""

    ms: _TimeMs | None = written_unless(None)
    share: Fraction | None = written_unless(None)

    @property
    def flops(self) -> float:
        """Operations that the share refers to."""
        raise NotImplementedError

    @property
    def max_share(self) -> float:
        """Share of a kernel that runs at the peak: above 1 if `flops` counts skipped work."""
        return 1.0

    @model_validator(mode="after")
    def _has_one_unit(self) -> Self:
        if (self.ms is None) == (self.share is None):
            raise ValueError("a measurement needs ms or share, not both")
        return self

    def time_ms(self, tflops: float | None) -> float:
        """Return the time in ms; `tflops` is the peak that shares refer to, unused with `ms`."""
        if self.ms is not None:
            return self.ms
        assert self.share is not None and tflops is not None, "Rates refuses shares without a peak"
        return self.flops / (self.share * tflops) * _MS_PER_FLOP

    def scale_share(self, tflops: float, scale: float, max_share: float = 1.0) -> Self:
        """Return a copy with `scale` x its share of `tflops`, up to `max_share` x its maximum."""
        share = self.share or self.flops / self.time_ms(tflops) / tflops * _MS_PER_FLOP
        share = min(share * scale, max_share * self.max_share)
        return self.model_copy(update={"ms": None, "share": share})


class ProductTime(_Computation):
    """One GEMM of a linear with `inner` inputs and `outer` outputs.

    Forward: [rows, inner] by [inner, outer]. Input gradient: [rows, outer] by [outer, inner].
    Weight gradient: [inner, rows] by [rows, outer], accumulated.
    """

    rows: Width
    inner: Width
    outer: Width
    of: ProductPass = written_unless("forward")
    gradient: GradientPrecision = written_unless("fp32")  # of the accumulated weight gradient

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outer


class GroupedTime(ProductTime):
    """Grouped GEMM of `groups` experts with `rows` each."""

    groups: Count

    @property
    def flops(self) -> float:
        return self.groups * super().flops


class AttentionTime(_Computation):
    """One attention kernel over a sample; shares count the full square, even of causal kernels."""

    share: Annotated[float, Field(ge=1e-9, le=2)] | None = written_unless(None)
    tokens: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    value_size: Count
    of: Literal["forward", "backward"] = "forward"
    causal: bool = written_unless(True)
    packed: bool = written_unless(False)  # q, k and v are views of one tensor

    @property
    def flops(self) -> float:
        # q k^T and its product with v; backward has five products for forward's two.
        passes = 1.0 if self.of == "forward" else 2.5
        return passes * 2 * self.heads * (self.head_size + self.value_size) * self.tokens**2.0

    @property
    def max_share(self) -> float:
        return 2.0 if self.causal else 1.0  # a causal kernel does half of the square


class _TransferTime(_Measurement):
    """Bytes and their time, or a latency and a rate."""

    bytes: _MovedBytes | None = written_unless(None)
    ms: _TimeMs | None = written_unless(None)
    latency_us: Annotated[float, Field(ge=0, le=1e9)] | None = written_unless(None)
    gb_per_s: Rate | None = written_unless(None)

    @model_validator(mode="after")
    def _is_point_or_line(self) -> Self:
        given = {name for name, value in self if name in _SPEED_FIELDS and value is not None}
        is_clear = given in ({"bytes", "ms"}, {"latency_us", "gb_per_s"})
        rule = "a measurement needs bytes and ms, or latency_us and gb_per_s"
        refuse_if(not is_clear, f"{rule} (given: {', '.join(sorted(given)) or 'neither'})")
        return self


class CollectiveTime(_TransferTime):
    """One collective of `ranks` neighbouring ranks, or one send between two.

    `bytes` is the full tensor. `gb_per_s` is bus bandwidth, bytes sent per rank: bytes in a send,
    (ranks - 1) / ranks x bytes otherwise, twice that in an all-reduce.
    """

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2, le=1_024)]
    place: Place = written_unless("node")  # "network": every rank on another node


class CopyTime(_TransferTime):
    """One copy within device memory; `bytes` are read + written."""

    kind: CopyKind = written_unless("plain")

    @property
    def bytes_per_ms(self) -> float:
        """Rate of the copy, without the latency if known."""
        if self.ms is not None:
            assert self.bytes is not None
            return self.bytes / self.ms
        assert self.gb_per_s is not None
        return self.gb_per_s * 1e6


class ScaledRates(Frozen):
    """Rate tables of another cluster, with factors on their shares of peak."""

    cluster: str
    products: Rate = 1.0
    grouped: Rate = 1.0
    attention: Rate = 1.0
    # Max shares of peak, forward and backward.
    attention_most: tuple[Fraction, Fraction] = (1.0, 1.0)


class Rates(Frozen):
    """Measurements of one device in one precision, all optional."""

    device: str
    tflops: Rate | None = written_unless(None)  # peak of the shares
    products: tuple[ProductTime, ...] = ()
    grouped: tuple[GroupedTime, ...] = written_unless(())
    attention: tuple[AttentionTime, ...] = written_unless(())
    collectives: tuple[CollectiveTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    # Share of a collective that a longer computation hides: 1 fully, 0 sequential.
    hidden: Annotated[float, Field(ge=0, le=1)] | None = written_unless(None)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: fits are looked up by it for every cost.
        return hash((self.device, self.products, self.grouped, self.attention))

    def scale_to_peak(self, own_tflops: float, tflops: float, scales: ScaledRates) -> "Rates":
        """Return rates of a device with peak `tflops`, at `scales` x the shares of this device's
        peak (`own_tflops` if the table has none).
        Copies and collectives depend on memory and links, so they are dropped.
        """
        peak, most = self.tflops or own_tflops, scales.attention_most
        return Rates.model_construct(
            device=f"{self.device}, scaled",
            tflops=tflops,
            products=tuple(t.scale_share(peak, scales.products) for t in self.products),
            grouped=tuple(t.scale_share(peak, scales.grouped) for t in self.grouped),
            attention=tuple(
                t.scale_share(peak, scales.attention, most[t.of == "backward"])
                for t in self.attention
            ),
        )

    @model_validator(mode="after")
    def _computations_are_clear(self) -> Self:
        tables: dict[str, Sequence[_Computation]] = {
            "products": self.products,
            "grouped": self.grouped,
            "attention": self.attention,
        }
        # Copies and collectives may repeat a size: lines are fitted through all.
        for name, given in tables.items():
            shapes = Counter(time.model_copy(update={"ms": None, "share": None}) for time in given)
            for shape, times in shapes.items():
                if times > 1:
                    sizes = ", ".join(f"{key} {value}" for key, value in shape.model_dump().items())
                    raise ValueError(f"{name}: {sizes} is given {times} times; drop the repeats")
            has_share = any(time.share is not None for time in given)
            rule = "shares need the peak that they refer to: add tflops, or give ms"
            refuse_if(has_share and self.tflops is None, rule)
        return self


NO_RATES = Rates(device="")
