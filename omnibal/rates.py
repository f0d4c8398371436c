"""Measured rates of a device, by shape: the table `rates` of a profile or a cluster.

Times are of one device while its neighbours are as busy. `omnibal.cost.shaped_rates` reads them.
"""

from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from omnibal.frozen import Frozen, Width

_Time = Annotated[float, Field(ge=1e-9, le=1e12)]
"""Measured time in ms; its limits keep fits finite."""
_Bytes = Annotated[int, Field(ge=1, le=2**60)]

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


class ProductTime(Frozen):
    """One matrix product: [rows, inner] by [inner, outer]."""

    rows: Width
    inner: Width
    outer: Width
    ms: _Time


class CollectiveTime(Frozen):
    """One collective of `ranks` neighbouring ranks on one machine, or one send between two."""

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2, le=1_024)]
    bytes: _Bytes
    """Of the whole tensor: what an all-reduce or a send takes, a reduce-scatter divides, and an
    all-gather puts together."""
    ms: _Time


class CopyTime(Frozen):
    """One copy within the device's memory."""

    bytes: _Bytes
    """Read and written together."""
    ms: _Time


class Rates(Frozen):
    """What was measured of one device in one precision; what is left out was not."""

    device: str
    products: tuple[ProductTime, ...] = ()
    """Every combination of some rows, inner and outer sizes, each once."""
    collectives: tuple[CollectiveTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()

    @property
    def product_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Sizes of products that were measured, ascending: rows, inner and outer."""
        return (
            tuple(sorted({one.rows for one in self.products})),
            tuple(sorted({one.inner for one in self.products})),
            tuple(sorted({one.outer for one in self.products})),
        )

    @model_validator(mode="after")
    def _products_are_a_grid(self) -> "Rates":
        given = sorted((one.rows, one.inner, one.outer) for one in self.products)
        wanted = list(product(*self.product_sizes))
        if given != wanted:
            raise ValueError(
                "products must be of every combination of their rows, inner and outer sizes, each "
                f"once: {len(wanted)} in all; given are {len(given)}, of which "
                f"{len(set(given))} differ"
            )
        return self
