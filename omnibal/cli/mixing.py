"""Mixtures of the sources of lengths, for the commands that pack."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from omnibal.cli.console import print_notes
from omnibal.data.lengths import Lengths
from omnibal.data.mixture import mix_samples, read_mixture, shortfalls

MixtureOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file: how often samples of each source are seen, by weight or in epochs "
        "(default: once an epoch)",
    ),
]


def draw_mixture(
    lengths: Lengths, mixture: Path | None, seed: int
) -> tuple[Lengths, tuple[int, ...]]:
    """Draw a mixture, if given; return samples per source too, and warn of unreachable shares."""
    if mixture is None:
        return lengths, ()
    rules = read_mixture(mixture)
    available = np.bincount(lengths.source, minlength=len(lengths.source_names))
    print_notes(shortfalls(rules, lengths.source_names, available))
    return mix_samples(lengths, rules, seed), tuple(available.tolist())
