"""Base of every configuration, and the types of its numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_LAYERS = 1_000
"""Most layers of one tower: with more, the search takes many minutes, then too much memory."""
MAX_COUNT = 2**31 - 1
"""Largest count of anything, as arrays hold 32-bit numbers."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=2**24)]
"""Width of a matrix; the product of two widths and all layers stays exact."""
Rate = Annotated[float, Field(ge=1e-9, le=1e18)]
"""Rate of a device, a link or a kernel; times and their sums over a run stay finite."""
Share = Annotated[float, Field(ge=1e-9, le=1)]


class Frozen(BaseModel):
    """Base of every configuration: immutable; an unknown key is an error, and so is NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
