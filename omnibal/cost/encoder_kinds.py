"""Counting functions of every encoder kind of `omnibal.model.encoders`."""

from collections.abc import Callable
from dataclasses import dataclass

from omnibal.base.errors import UserError
from omnibal.cost.counts import Counts
from omnibal.cost.encoder_counts import clips_embed, encoder_projector, items_layer, tiles_embed
from omnibal.cost.image_counts import images_embed, images_layer, images_projector
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, ImagesEncoder, TilesEncoder
from omnibal.model.limits import words


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """Counting functions of an encoder kind."""

    embed: Callable[..., Counts]
    """Counts of the input embedding: (encoder, device, features)."""
    layer: Callable[..., Counts]
    """Counts of a layer: (model, encoder, unit kind, device, features, padded=...)."""
    projector: Callable[..., Counts]
    """Counts of the projector: (encoder, model, device, features)."""


_OF_KIND: dict[type[EncoderLayers], EncoderCounts] = {
    TilesEncoder: EncoderCounts(tiles_embed, items_layer, encoder_projector),
    ClipsEncoder: EncoderCounts(clips_embed, items_layer, encoder_projector),
    ImagesEncoder: EncoderCounts(images_embed, images_layer, images_projector),
}


def counts_of_kind(tower: EncoderLayers) -> EncoderCounts:
    """Return the counting functions of the encoder's kind."""
    found = _OF_KIND.get(type(tower))
    if found is None:
        known = words([kind.__name__ for kind in _OF_KIND], "or")
        raise UserError(
            f"encoders of {type(tower).__name__} have no costs, and are not planned; it must be "
            f"{known}, or have a line in omnibal/cost/encoder_kinds.py"
        )
    return found
