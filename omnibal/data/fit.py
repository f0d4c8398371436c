"""Input checks that every packing rule shares."""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.errors import UserError
from omnibal.limits import Caps

Seed = int | np.random.SeedSequence

_LISTED_SAMPLES = 5


def check_samples_fit(lengths: Lengths, caps: Caps) -> None:
    """Refuse samples that no pack can hold.

    Raises:
        UserError: names the first few of them and the ways out.
    """
    large = np.flatnonzero((lengths.tiles > caps.max_tiles) | (lengths.tokens > caps.max_tokens))
    if not len(large):
        return
    listed = "; ".join(
        f"sample {i} of {lengths.source_names[lengths.source[i]]} has {lengths.tiles[i]} tiles and "
        f"{lengths.tokens[i]} tokens"
        for i in large[:_LISTED_SAMPLES]
    )
    more = f"; and {len(large) - _LISTED_SAMPLES} more" if len(large) > _LISTED_SAMPLES else ""
    raise UserError(
        f"{len(large)} of {len(lengths)} samples exceed the caps of {caps.max_tiles} tiles and "
        f"{caps.max_tokens} tokens ({listed}{more}); every sample must fit into one pack: raise "
        f"the caps (--max-tiles {max(lengths.tiles.max(), caps.max_tiles)} --max-tokens "
        f"{max(lengths.tokens.max(), caps.max_tokens)} would do), split the samples, or drop them "
        "from the dataset"
    )


def in_common_units(lengths: Lengths, caps: Caps) -> tuple[np.ndarray, np.ndarray, Caps]:
    """Tiles and tokens [samples] in their greatest common divisors, as int64, and the caps in them.

    Lengths rounded to multiples of 256 are small numbers then, and what of a cap is no multiple is
    no room.
    """
    tile_unit, token_unit = (
        max(int(np.gcd.reduce(sizes)), 1) for sizes in (lengths.tiles, lengths.tokens)
    )
    units = Caps(
        max_tiles=max(caps.max_tiles // tile_unit, 1), max_tokens=caps.max_tokens // token_unit
    )
    tiles, tokens = lengths.tiles.astype(np.int64), lengths.tokens.astype(np.int64)
    return tiles // tile_unit, tokens // token_unit, units
