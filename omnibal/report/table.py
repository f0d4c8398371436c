"""Tables and panels of facts, each made once for the terminal and the page.

On a terminal `rich` asks them for what it prints; the page's template writes them as HTML.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

from rich import box
from rich.table import Table as TerminalTable

from omnibal.report.formatting import percent

R = TypeVar("R")
Style = Literal["", "bold", "left", "wrap", "mark"]
"""Kind of a column's cells: numbers, the numbers that matter most, names, text that may take
several lines, or signs."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Text with a class of report.css, and what a pointer resting on it shows."""

    text: str
    css: str
    tip: str = ""

    @classmethod
    def share(cls, fraction: float) -> "Marked":
        """A share of what is there in percent: good up to all of it."""
        return cls(percent(fraction), "good" if fraction <= 1 else "bad")

    def __str__(self) -> str:
        return self.text


Cell = str | Marked
Row = Sequence[Cell]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Heading and style of a column; neighbours of one non-empty group share a heading above."""

    title: str
    group: str = ""
    style: Style = ""
    least_width: int = 0
    """Least characters on a terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells in sections, with a title for a terminal and a caption for the page."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Sequence[Row]]
    """Rows of each section; a terminal draws a rule between sections."""
    caption: str = ""
    tight: bool = False
    """Whether a terminal shows no space at the edges, so that 80 characters hold the table."""

    @classmethod
    def of_columns(
        cls, title: str, columns: Iterable[tuple[Column, Sequence[Cell]]], caption: str = ""
    ) -> "Table":
        """A table of one section, by its columns and their cells."""
        heads, cells = zip(*columns, strict=True)
        rows = list(zip(*cells, strict=True))
        return cls(title=title, columns=heads, sections=[rows], caption=caption, tight=True)

    @classmethod
    def of_rows(
        cls,
        title: str,
        titles: Iterable[str | Column],
        *sections: Sequence[Row],
        caption: str = "",
    ) -> "Table":
        """A table of these sections; columns of numbers are given by their titles."""
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
        """A table of a row per record, by the columns' titles and what makes their cells."""
        rows = [[cell(record) for cell in columns.values()] for record in records]
        return cls.of_rows(title, columns, rows, caption=caption)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings above the columns' own and how many columns each spans; empty without any."""
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
    """Names and values."""

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
