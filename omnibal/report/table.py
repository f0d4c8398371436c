"""Tables and panels of facts, printed by `rich` and rendered as HTML by the page's template."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table as TerminalTable

from omnibal.base.printable import printable
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
TableRow = Sequence[Cell]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Heading and style of a column; neighbours of a group share a heading."""

    title: str
    group: str = ""
    style: Style = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows in sections, with a title (terminal) and a caption (page)."""

    title: str
    columns: Sequence[Column]
    sections: Sequence[Sequence[TableRow]]
    """Rows per section. A terminal draws a rule between sections."""
    caption: str = ""
    keys: int = 1
    """Leading columns to repeat if a terminal is too narrow for all columns side by side."""

    @classmethod
    def of_rows(
        cls,
        title: str,
        titles: Iterable[str | Column],
        *sections: Sequence[TableRow],
        caption: str = "",
        keys: int = 1,
    ) -> "Table":
        """Make a table of sections. A title alone is a column of numbers."""
        columns = [head if isinstance(head, Column) else Column(title=head) for head in titles]
        return cls(title=title, columns=columns, sections=sections, caption=caption, keys=keys)

    @classmethod
    def of_columns(
        cls, title: str, columns: Sequence[tuple[Column, Sequence[Cell]]], caption: str = ""
    ) -> "Table":
        """Make a table of columns with their cells, padded with empty ones."""
        heads, cells = zip(*columns, strict=True)
        return cls.of_rows(title, heads, [*zip_longest(*cells, fillvalue="")], caption=caption)

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

    @property
    def headings(self) -> list[str]:
        """Return the columns' titles on a terminal, below their group's if there are several."""
        has_several = len({column.group for column in self.columns if column.group}) > 1
        return [f"{c.group}\n{c.title}" if has_several else c.title for c in self.columns]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[TerminalTable]:
        """Yield the table, in parts if its words are too long for one."""
        rows = [row for section in self.sections for row in section]
        cells = [
            [heading, *(printable(str(row[index])) for row in rows)]
            for index, heading in enumerate(self.headings)
        ]
        least = [max(cell_len(word) for cell in of for word in [*cell.split(), ""]) for of in cells]
        most = [max(cell_len(line) for cell in of for line in cell.split("\n")) for of in cells]
        keys = list(range(self.keys))
        parts = [keys]
        for index in range(self.keys, len(cells)):
            if _room(options, [*parts[-1], index], least) < 0 and parts[-1] != keys:
                parts.append(keys)
            parts[-1] = [*parts[-1], index]
        for number, part in enumerate(parts):
            widths, room = {index: least[index] for index in part}, _room(options, part, least)
            for index in sorted(part, key=lambda index: most[index] - least[index]):
                more = max(min(most[index] - least[index], room), 0)
                widths[index], room = least[index] + more, room - more
            yield self._draw(widths, self.title if number == 0 else "")

    def _draw(self, widths: Mapping[int, int], title: str) -> TerminalTable:
        table = TerminalTable(
            title=title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            show_header=any(column.title for column in self.columns),
        )
        for index, width in widths.items():
            is_left = self.columns[index].style in ("left", "wrap")
            table.add_column(
                self.headings[index],
                justify="left" if is_left else "right",
                width=width,
                overflow="fold",
            )
        for rows in self.sections:
            for row in rows:
                table.add_row(*(printable(str(row[index])) for index in widths))
            table.add_section()
        return table


def _room(options: ConsoleOptions, columns: Sequence[int], widths: Sequence[int]) -> int:
    """Characters left of a line with columns of some widths."""
    return options.max_width - 2 * len(columns) - sum(widths[index] for index in columns)


@dataclass(frozen=True, slots=True)
class Facts:
    title: str
    entries: Sequence[tuple[str, str | Marked]]

    def __rich__(self) -> Table:
        return Table.of_rows(self.title, (Column(title="", style="left"), ""), self.entries)
