"""Checks that samples fit, and sizes as integer arrays, for all packing rules."""

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps, words

Seed = int | np.random.SeedSequence

_MAX_KEY = 1 << 62  # int64 without overflow of a sum of two


def check_samples_fit(lengths: Lengths, caps: Caps) -> None:
    """Raise UserError unless every sample fits into a pack."""
    is_over = np.any([lengths.column(name) > caps[name] for name in caps.names], axis=0)
    if not is_over.any():
        return
    first = int(is_over.argmax())
    size = words([f"{lengths.column(name)[first]} {name}" for name in caps.names])
    enough = {name: max(int(lengths.column(name).max()), caps[name]) for name in caps.names}
    options = " ".join(Caps.of(**enough).options)
    raise UserError(
        f"{is_over.sum()} of {len(lengths)} samples exceed the caps of {caps} (the first is sample "
        f"{first} of {lengths.source_names[lengths.source[first]]} with {size}); every sample must "
        f"fit into one pack: raise the caps ({options} would do), or split or drop the samples"
    )


def in_common_units(lengths: Lengths, caps: Caps) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes [features, samples] and caps [features], int64, in units of each feature's GCD.

    Features are in the caps' order, `tokens` last. Caps are rounded down, to at least 1.
    """
    sizes = lengths.sizes(caps.names)
    units = np.maximum(np.gcd.reduce(sizes, axis=1), 1)
    return sizes // units[:, None], np.maximum(caps.values // units, 1)


def size_keys(sizes: np.ndarray) -> np.ndarray:
    """Return int64 keys [samples] that sort as sizes [features, samples] >= 0, within a call."""
    keys = np.zeros(sizes.shape[1], np.int64)
    for row in sizes:
        span = int(row.max(initial=0)) + 1
        if (int(keys.max(initial=0)) + 1) * span > _MAX_KEY:
            _, keys = np.unique(keys, return_inverse=True)  # keeps the order, without gaps
        keys = keys * span + row
    return keys
