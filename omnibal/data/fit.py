"""Input checks that every packing rule shares."""

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.errors import UserError
from omnibal.limits import Caps, words

Seed = int | np.random.SeedSequence

_LISTED_SAMPLES = 5


def check_samples_fit(lengths: Lengths, caps: Caps) -> None:
    """Refuse samples that no pack can hold.

    Raises:
        UserError: names the first few of them and the ways out.
    """
    over = [lengths.column(name) > caps[name] for name in caps.names]
    large = np.flatnonzero(np.any(over, axis=0))
    if not len(large):
        return
    listed = "; ".join(
        f"sample {i} of {lengths.source_names[lengths.source[i]]} has "
        + words([f"{lengths.column(name)[i]} {name}" for name in caps.names])
        for i in large[:_LISTED_SAMPLES]
    )
    more = f"; and {len(large) - _LISTED_SAMPLES} more" if len(large) > _LISTED_SAMPLES else ""
    enough = {name: max(int(lengths.column(name).max()), caps[name]) for name in caps.names}
    raise UserError(
        f"{len(large)} of {len(lengths)} samples exceed the caps of {caps} ({listed}{more}); every "
        f"sample must fit into one pack: raise the caps ({Caps.of(**enough).options} would do), "
        "split the samples, or drop them from the dataset"
    )


def in_common_units(lengths: Lengths, caps: Caps) -> tuple[np.ndarray, np.ndarray, Caps]:
    """Tiles and tokens [samples] in their greatest common divisors, as int64, and the caps in them.

    Lengths rounded to multiples of 256 are small numbers then, and what of a cap is no multiple is
    no room.
    """
    tile_unit, token_unit = (
        max(int(np.gcd.reduce(sizes)), 1) for sizes in (lengths.column("tiles"), lengths.tokens)
    )
    units = Caps.of(tiles=max(caps["tiles"] // tile_unit, 1), tokens=caps["tokens"] // token_unit)
    tiles, tokens = lengths.column("tiles").astype(np.int64), lengths.tokens.astype(np.int64)
    return tiles // tile_unit, tokens // token_unit, units
