"""Sample lengths by source, as plain values and as a table."""

from typing import Any

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.report.svg import drawing, line, rect
from omnibal.report.table import Cell, Column, Drawing, Table


def length_statistics(lengths: Lengths, rows: np.ndarray) -> dict[str, float | None]:
    """Count of the samples in `rows`, and mean and most of every feature (None without any)."""
    statistics: dict[str, float | None] = {"samples": int(rows.sum())}
    for name in (*lengths.item_names, "tokens"):
        values = lengths.column(name)[rows]
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

    `most` is the largest number of sources with rows of their own: those of most samples, in order.
    """
    codes = np.arange(len(lengths.source_names))
    if most is not None:
        codes = np.argsort(-np.bincount(lengths.source, minlength=len(codes)), kind="stable")
    groups = [(lengths.source_names[code], codes[i : i + 1]) for i, code in enumerate(codes[:most])]
    rest = codes[len(groups) :]
    groups += [(f"{len(rest)} smaller sources", rest)] if len(rest) else []
    features = {name: _histogram_edges(lengths, name) for name in (*lengths.item_names, "tokens")}

    def row(name: str, of_group: np.ndarray) -> list[Cell]:
        rows = np.isin(lengths.source, of_group)
        statistics = length_statistics(lengths, rows)
        cells: list[Cell] = [name, f"{statistics['samples']:,.0f}"]
        for feature, (edges, _) in features.items():
            for quantity, digits in (("mean", 1 if feature == "tokens" else 2), ("max", 0)):
                value = statistics[f"{feature}_{quantity}"]
                cells.append("-" if value is None else f"{value:,.{digits}f}")
            counts = np.histogram(lengths.column(feature)[rows], edges)[0]
            css = "language" if feature == "tokens" else "vision"
            cells.append(_bars(counts, css, f"{feature}: {name}"))
        return cells

    columns: list[str | Column] = [Column(title="source", style="wrap"), "samples"]
    for feature, (_, title) in features.items():
        columns += [f"{feature} mean", f"{feature} max", Column(title=title, style="drawing")]
    return Table.of_rows(
        "Sample lengths",
        columns,
        [row(*group) for group in groups],
        [row("all", codes)],
        caption="Samples by source; bar heights are relative to the row's highest.",
    )


def _histogram_edges(lengths: Lengths, feature: str) -> tuple[np.ndarray, str]:
    """Edges of the bars of one feature's histograms, and their title."""
    values = lengths.column(feature)
    if feature != "tokens":
        most = int(values.max())
        return np.linspace(-0.5, most + 0.5, min(most + 1, 40) + 1), f"{feature}, 0 to {most}"
    least, most = values.min(), max(values.max(), values.min() + 1)
    edges = np.geomspace(least, most, 31)
    # Rounding may put the outermost samples a hair outside.
    edges[[0, -1]] = least, most
    return edges, f"tokens, {least:,} to {values.max():,}, logarithmic"


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
