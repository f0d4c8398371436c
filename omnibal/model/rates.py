"""Measured rates of a device, by shape: the table `rates` of a profile or a cluster.

Profiles, cluster files and imported tables share it. Times are of one device while its neighbours
are as busy; in place of a time, a share of the peak `tflops` may be given. Shapes may be any, and
what is left out was not measured. `omnibal.cost.shaped_rates`, `omnibal.cost.scattered_rates` and
`omnibal.cost.attention_rates` read it.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omnibal.base.frozen import Count, Frozen, Rate, Share, Width, written_unless

_Time = Annotated[float, Field(ge=1e-9, le=1e12)]
"""Measured time in ms; its limits keep fits finite."""
_Bytes = Annotated[int, Field(ge=1, le=2**60)]
_MS_PER_FLOP = 1e-9
"""Milliseconds of one operation at a TFLOP/s."""

RingKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
CollectiveKind = Literal[RingKind, "all_to_all", "send"]
CopyKind = Literal["plain", "permute", "permute_backward", "cross_entropy", "fused_cross_entropy"]
Pass = Literal["forward", "input_gradient", "weight_gradient"]
GradientPrecision = Literal["fp32", "bf16"]
Place = Literal["node", "network"]


class _Timed(Frozen):
    """A measurement, which is written shape first."""

    @model_serializer(mode="wrap")
    def _shape_first(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return dict(sorted(fields.items(), key=lambda field: field[0] in _UNITS))


_UNITS = ("bytes", "latency_us", "gb_per_s", "ms", "share")
"""Fields that say how fast; all others say what."""


class _Measured(_Timed):
    """A time, or the share of the table's peak at which the operations were done."""

    ms: _Time | None = written_unless(None)
    share: Share | None = written_unless(None)

    @property
    def flops(self) -> float:
        """Operations that the share is of."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _has_one_unit(self) -> Self:
        if (self.ms is None) == (self.share is None):
            raise ValueError("a measurement needs either ms or share, one of the two")
        return self

    def time_ms(self, tflops: float | None) -> float:
        """Time, where shares are of `tflops`."""
        if self.ms is not None:
            return self.ms
        assert self.share is not None and tflops is not None, "Rates refuses shares without a peak"
        return self.flops / (self.share * tflops) * _MS_PER_FLOP

    def scaled(self, tflops: float, scale: float) -> Self:
        """The measurement with `scale` times its share of `tflops`, at most what is possible."""
        share = self.share or self.flops / self.time_ms(tflops) / tflops * _MS_PER_FLOP
        share = min(share * scale, self._most_share)
        return self.model_copy(update={"ms": None, "share": share})

    @property
    def _most_share(self) -> float:
        return 1.0


class ProductTime(_Measured):
    """One matrix product of a linear layer of `inner` inputs and `outer` outputs.

    Forward: [rows, inner] by [inner, outer]. The input's gradient: [rows, outer] by [outer, inner].
    The weights' gradient: [inner, rows] by [rows, outer], added to what is there.
    """

    rows: Width
    inner: Width
    outer: Width
    of: Pass = written_unless("forward")
    gradient: GradientPrecision = written_unless("fp32")
    """Precision of the weights' gradient, which it is read and written in."""

    @property
    def flops(self) -> float:
        """Operations: two for each of rows, inner and outer."""
        return 2.0 * self.rows * self.inner * self.outer


class GroupedTime(ProductTime):
    """Products of so many `groups` in one kernel, of `rows` each, as experts do."""

    groups: Count

    @property
    def flops(self) -> float:
        """Operations of all groups."""
        return self.groups * super().flops


class AttentionTime(_Measured):
    """One kernel of attention over one sample.

    A share counts the full square also where the kernel is causal, so that it may be up to 2: in
    forward 2 products of 2 tokens^2 operations per head and element, q k^T over `head_size` and the
    one with v over `value_size`; in backward 2.5 times as many.
    """

    share: Annotated[float, Field(ge=1e-9, le=2)] | None = written_unless(None)
    tokens: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    value_size: Count
    of: Literal["forward", "backward"] = "forward"
    causal: bool = written_unless(True)
    packed: bool = written_unless(False)
    """Whether q, k and v are views of one tensor rather than three of their own."""

    @property
    def _most_share(self) -> float:
        return 2.0

    @property
    def flops(self) -> float:
        """Operations of the full square, both halves."""
        passes = 1.0 if self.of == "forward" else 2.5
        return passes * 2 * self.heads * (self.head_size + self.value_size) * self.tokens**2.0


class _Moved(_Timed):
    """Bytes and their time, or a line: a latency and the rate of all further bytes."""

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

    `bytes` are of the whole tensor: what an all-reduce, an all-to-all or a send takes, a
    reduce-scatter divides, and an all-gather puts together. The `gb_per_s` of a line are of bytes
    that a rank sends: of the tensor, all of it in a send, (ranks - 1) / ranks in the others, and
    twice that in an all-reduce.
    """

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2, le=1_024)]
    place: Place = written_unless("node")
    """Whether the ranks are within a node or each on another."""


class CopyTime(_Moved):
    """One copy within the device's memory; `bytes` are those read and written together."""

    kind: CopyKind = written_unless("plain")

    @property
    def latency_ms(self) -> float | None:
        """Time besides that of its bytes; None where they were timed together."""
        return None if self.latency_us is None else self.latency_us / 1e3

    @property
    def bytes_per_ms(self) -> float:
        """Rate of the copy, of a line without its latency."""
        if self.ms is not None:
            assert self.bytes is not None
            return self.bytes / self.ms
        assert self.gb_per_s is not None
        return self.gb_per_s * 1e6


class Rates(Frozen):
    """What was measured of one device in one precision; what is left out was not."""

    device: str
    tflops: Rate | None = written_unless(None)
    """Peak that shares are of."""
    products: tuple[ProductTime, ...] = ()
    grouped: tuple[GroupedTime, ...] = written_unless(())
    attention: tuple[AttentionTime, ...] = written_unless(())
    collectives: tuple[CollectiveTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    hidden: Annotated[float, Field(ge=0, le=1)] | None = written_unless(None)
    """Hidden share of a collective beside a computation that takes longer: 1 where both take as
    long as the computation alone, 0 where they take as long as one after the other, as where
    the same cores do both."""

    @property
    def _measured(self) -> dict[str, Sequence[_Measured]]:
        """Times of computation by their tables' names."""
        tables = {"products": self.products, "grouped": self.grouped}
        return {**tables, "attention": self.attention}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Once: what is fitted to a table is looked up for every cost model.
        return hash((self.device, self.products, self.grouped, self.attention))

    def of_peak(
        self, own_tflops: float, tflops: float, *, products: float, grouped: float, attention: float
    ) -> Self:
        """Rates of another device, of the peak `tflops`, that reaches so many times the shares of
        `own_tflops` that this one does; without copies and collectives, which are of its links."""
        peak = self.tflops or own_tflops
        return self.model_copy(
            update={
                "device": f"{self.device}, scaled",
                "tflops": tflops,
                "products": tuple(one.scaled(peak, products) for one in self.products),
                "grouped": tuple(one.scaled(peak, grouped) for one in self.grouped),
                "attention": tuple(one.scaled(peak, attention) for one in self.attention),
                "collectives": (),
                "copies": (),
                "hidden": None,
            }
        )

    @model_validator(mode="after")
    def _shapes_are_given_once(self) -> Self:
        # Copies and collectives of a size may be timed again: lines are fitted through all.
        for name, given in self._measured.items():
            shapes = Counter(one.model_copy(update={"ms": None, "share": None}) for one in given)
            for shape, times in shapes.items():
                if times > 1:
                    sizes = ", ".join(f"{key} {value}" for key, value in shape.model_dump().items())
                    raise ValueError(f"{name}: {sizes} is given {times} times; keep one of them")
        return self

    @model_validator(mode="after")
    def _shares_have_a_peak(self) -> Self:
        shares = any(one.share is not None for given in self._measured.values() for one in given)
        if shares and self.tflops is None:
            raise ValueError(
                "shares are given without the peak that they are of; add tflops, or give ms"
            )
        return self
