"""Sample lengths by source, as plain values and as a table."""

from typing import Any

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.report.table import Column, Table


def length_statistics(lengths: Lengths, rows: np.ndarray) -> dict[str, float | None]:
    """Count samples in `rows`, with mean and max of every feature (None without samples)."""
    statistics: dict[str, float | None] = {"samples": int(rows.sum())}
    for name in (*lengths.item_names, "tokens"):
        values = lengths.column(name)[rows]
        statistics[f"{name}_mean"] = float(values.mean()) if len(values) else None
        statistics[f"{name}_max"] = int(values.max()) if len(values) else None
    return statistics


def source_statistics(lengths: Lengths) -> list[dict[str, Any]]:
    return [
        {"source": name, **length_statistics(lengths, lengths.source == code)}
        for code, name in enumerate(lengths.source_names)
    ]


def sources_table(lengths: Lengths, most: int | None = None) -> Table:
    """Table of samples, items and tokens by source, at most the `most` largest, and in total."""
    features, codes = (*lengths.item_names, "tokens"), np.arange(len(lengths.source_names))
    if most is not None:
        codes = np.argsort(-np.bincount(lengths.source, minlength=len(codes)), kind="stable")
    groups = [(lengths.source_names[code], codes[i : i + 1]) for i, code in enumerate(codes[:most])]
    rest = codes[len(groups) :]
    groups += [(f"{len(rest)} smaller sources", rest)] if len(rest) else []

    def row(name: str, codes: np.ndarray) -> list[str]:
        statistics = length_statistics(lengths, np.isin(lengths.source, codes))
        cells = [name, f"{statistics['samples']:,.0f}"]
        for feature in features:
            for quantity, digits in (("mean", 1 if feature == "tokens" else 2), ("max", 0)):
                value = statistics[f"{feature}_{quantity}"]
                cells.append("-" if value is None else f"{value:,.{digits}f}")
        return cells

    rows = [row(*group) for group in groups]
    titles = [f"{feature} {quantity}" for feature in features for quantity in ("mean", "max")]
    source = Column(title="source", style="wrap")
    return Table.of_rows("Sample lengths", [source, "samples", *titles], rows, [row("all", codes)])
