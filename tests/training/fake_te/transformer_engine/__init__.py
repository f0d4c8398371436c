"""Stand-in for Transformer Engine 2.2 on a CPU, for Megatron-core's own classes to be built over.

Arguments are those of its documentation; what it computes is plain torch on one device, in FP8 too,
whose contexts and checks of shapes alone are those of the real one.
"""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

from transformer_engine import pytorch as pytorch

__version__ = "2.2.0"


class Format(Enum):
    """Types of 8 bits, forward and backward."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Float8CurrentScaling:
    """A scale for every tensor, of its own values."""

    fp8_format: Format
    fp8_dpa: bool = False


common = SimpleNamespace(
    recipe=SimpleNamespace(
        DelayedScaling=object, Float8CurrentScaling=Float8CurrentScaling, Format=Format
    )
)
