"""Tables and panels of facts, printed by `rich` and rendered as HTML by the page's template."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

from rich import box
from rich.table import Table as TerminalTable

from omnibal.report.formatting import percent

R = TypeVar("R")
Style = Literal["", "bold", "left", "wrap", "mark"]
"""Kind of a column's cells: numbers, main numbers, names, wrapped text or signs."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Text with a class of report.css and a tooltip."""

    text: str
    css: str
    tip: str = ""

    @classmethod
    def share(cls, fraction: float) -> "Marked":
        """Format a share in percent, marked good up to 100 %."""
        return cls(percent(fraction), "good" if fraction <= 1 else "bad")

    def __str__(self) -> str:
        return self.text


Cell = str | Marked
Row = Sequence[Cell]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Heading and style of a column; neighbours of a group share a heading."""

    title: str
    group: str = ""
    style: Style = ""
    least_width: int = 0
    """Min characters on a terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows in sections, with a title (terminal) and a caption (page)."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Sequence[Row]]
    """Rows per section. A terminal draws a rule between sections."""
    caption: str = ""
    tight: bool = False
    """Whether to omit edge padding on terminals, to fit 80 characters."""

    @classmethod
    def of_columns(
        cls, title: str, columns: Iterable[tuple[Column, Sequence[Cell]]], caption: str = ""
    ) -> "Table":
        """Make a single-section table from columns and cells."""
        heads, cells = zip(*columns, strict=True)
        rows = list(zip(*cells, strict=True))
        return cls(title=title, columns=heads, sections=[rows], caption=caption, tight=True)

    @classmethod
    def of_rows(
        cls, title: str, titles: Iterable[str | Column], *sections: Sequence[Row], caption: str = ""
    ) -> "Table":
        """Make a table of sections. A title alone is a column of numbers."""
        columns = [one if isinstance(one, Column) else Column(title=one) for one in titles]
        return cls(title=title, columns=columns, sections=sections, caption=caption, tight=True)

    @classmethod
    def of_records(
        cls,
        title: str,
        records: Iterable[R],
        columns: Mapping[str | Column, Callable[[R], Cell]],
        caption: str = "",
    ) -> "Table":
        """Make a table with a row per record, from column titles and cell functions."""
        rows = [[cell(record) for cell in columns.values()] for record in records]
        return cls.of_rows(title, columns, rows, caption=caption)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Return group headings and the number of columns each spans, if any."""
        spans = [(name, len(list(of))) for name, of in groupby(c.group for c in self.columns)]
        return spans if any(name for name, _ in spans) else []

    def __rich__(self) -> TerminalTable:
        table = TerminalTable(
            title=self.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=not self.tight,
        )
        for column in self.columns:
            table.add_column(
                column.title,
                justify="left" if column.style in ("left", "wrap") else "right",
                overflow="fold" if column.style == "wrap" else "ellipsis",
                min_width=column.least_width or None,
            )
        for rows in self.sections:
            for row in rows:
                table.add_row(*map(str, row))
            table.add_section()
        return table


@dataclass(frozen=True, slots=True)
class Facts:
    title: str
    entries: Sequence[tuple[str, str | Marked]]

    def __rich__(self) -> TerminalTable:
        table = TerminalTable(
            title=self.title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD
        )
        table.add_column()
        table.add_column(justify="right")
        for name, value in self.entries:
            table.add_row(name, str(value))
        return table
