"""Sample lengths by source, as plain values and as a table."""

from typing import Any

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.report.svg import drawing, line, rect
from omnibal.report.table import Cell, Column, Drawing, Table

_DIGITS = {"samples": 0, "tiles_mean": 2, "tiles_max": 0, "tokens_mean": 1, "tokens_max": 0}
"""Decimals of each of `length_statistics`, in its order."""


def length_statistics(lengths: Lengths, rows: np.ndarray) -> dict[str, float | None]:
    """Count, and mean and most tiles and tokens, of the samples in `rows` (None without any)."""
    statistics: dict[str, float | None] = {"samples": int(rows.sum())}
    for name, values in (
        ("tiles", lengths.column("tiles")[rows]),
        ("tokens", lengths.tokens[rows]),
    ):
        statistics[f"{name}_mean"] = float(values.mean()) if len(values) else None
        statistics[f"{name}_max"] = int(values.max()) if len(values) else None
    return statistics


def source_statistics(lengths: Lengths) -> list[dict[str, Any]]:
    """`length_statistics` of every source, with its name."""
    return [
        {"source": name, **length_statistics(lengths, lengths.source == code)}
        for code, name in enumerate(lengths.source_names)
    ]


def sources_table(lengths: Lengths, most: int | None = None) -> Table:
    """Samples, tiles and tokens of every source, and of all, with histograms on common axes.

    With `most`, at most so many sources have rows of their own: those of most samples, in order.
    """
    codes = np.arange(len(lengths.source_names))
    if most is not None:
        codes = np.argsort(-np.bincount(lengths.source, minlength=len(codes)), kind="stable")
    groups = [(lengths.source_names[code], codes[i : i + 1]) for i, code in enumerate(codes[:most])]
    rest = codes[len(groups) :]
    groups += [(f"{len(rest)} smaller sources", rest)] if len(rest) else []
    tokens, most_tiles = lengths.tokens, int(lengths.column("tiles").max())
    tile_edges = np.linspace(-0.5, most_tiles + 0.5, min(most_tiles + 1, 40) + 1)
    token_edges = np.geomspace(tokens.min(), max(tokens.max(), tokens.min() + 1), 31)
    # Rounding may put the outermost samples a hair outside.
    token_edges[[0, -1]] = tokens.min(), max(tokens.max(), tokens.min() + 1)

    def row(name: str, of_group: np.ndarray) -> list[Cell]:
        rows = np.isin(lengths.source, of_group)
        values = zip(length_statistics(lengths, rows).values(), _DIGITS.values(), strict=True)
        numbers = ["-" if value is None else f"{value:,.{n}f}" for value, n in values]
        tiles = _bars(
            np.histogram(lengths.column("tiles")[rows], tile_edges)[0], "vision", f"tiles: {name}"
        )
        texts = _bars(np.histogram(tokens[rows], token_edges)[0], "language", f"tokens: {name}")
        return [name, *numbers[:3], tiles, *numbers[3:], texts]

    token_range = f"tokens, {tokens.min():,} to {tokens.max():,}, logarithmic"
    return Table(
        title="Sample lengths",
        columns=(
            Column(title="source", style="wrap"),
            *(Column(title=title) for title in ("samples", "tiles mean", "tiles max")),
            Column(title=f"tiles, 0 to {most_tiles}", style="drawing"),
            *(Column(title=title) for title in ("tokens mean", "tokens max")),
            Column(title=token_range, style="drawing"),
        ),
        sections=([row(*group) for group in groups], [row("all", codes)]),
        caption="Samples by source; bar heights are relative to the row's highest.",
    )


def _bars(counts: np.ndarray, css: str, what: str) -> Drawing:
    """A histogram without axes."""
    width, height = 180.0, 26.0
    pitch, top = width / len(counts), max(1, int(counts.max()))
    parts = [
        rect(i * pitch, height - tall, max(pitch - 1, 0.8), tall, css)
        for i, count in enumerate(counts)
        if count
        for tall in [max(1.0, height * count / top)]
    ]
    axis = line(0, height, width, height, "axis")
    return Drawing(drawing(width, height, f"histogram of {what}", [*parts, axis], "spark"))
