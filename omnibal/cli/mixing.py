"""`--mixture` of the commands that pack: weights or epochs by data source."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from omnibal.cli.console import print_notes
from omnibal.data.lengths import Lengths
from omnibal.data.mixture import mix_samples, read_mixture, shortfalls

MixtureOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML of weights or epochs by source (default: equal)"),
]


def draw_mixture(
    lengths: Lengths, mixture: Path | None, seed: int
) -> tuple[Lengths, tuple[int, ...]]:
    """Return the drawn lengths, and the samples available by source (empty without a mixture)."""
    if mixture is None:
        return lengths, ()
    rules = read_mixture(mixture)
    available = np.bincount(lengths.source, minlength=len(lengths.source_names))  # [sources]
    print_notes(shortfalls(rules, lengths.source_names, available))  # unreachable shares
    return mix_samples(lengths, rules, seed), tuple(available.tolist())
