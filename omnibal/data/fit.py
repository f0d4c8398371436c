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
