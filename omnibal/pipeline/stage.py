"""A pipeline stage: the model units that it holds, and the layers that it recomputes."""

from typing import Annotated

from pydantic import Field

from omnibal.config import Part
from omnibal.frozen import MAX_LAYERS, Frozen

HeldLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]


class Stage(Frozen):
    """A contiguous run of the model's units, in model order.

    The units are: vision embed, vision layers, projector, language embed, language layers, head.
    """

    vision_embed: bool
    vision_layers: HeldLayers
    projector: bool
    language_embed: bool
    language_layers: HeldLayers
    head: bool
    recompute_vision: tuple[HeldLayers, ...] = ()
    """Vision layers (numbered from 0 over the whole model) whose activations are recomputed."""
    recompute_language: tuple[HeldLayers, ...] = ()
    """Language layers (numbered from 0 over the whole model) that are recomputed."""

    @classmethod
    def whole(cls, vision_layers: int, language_layers: int) -> "Stage":
        """Make a stage of all kinds of unit, with this number of layers of each tower."""
        return cls(
            vision_embed=True,
            vision_layers=vision_layers,
            projector=True,
            language_embed=True,
            language_layers=language_layers,
            head=True,
        )

    @property
    def parts(self) -> frozenset[Part]:
        """Parts of the model that have a unit in this stage."""
        held = {
            Part.VISION: self.vision_embed or self.vision_layers,
            Part.PROJECTOR: self.projector,
            Part.LANGUAGE: self.language_embed or self.language_layers or self.head,
        }
        return frozenset(part for part, units in held.items() if units)

    @property
    def recomputed_layers(self) -> int:
        """Number of layers of both towers whose activations are recomputed."""
        return len(self.recompute_vision) + len(self.recompute_language)
