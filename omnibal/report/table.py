"""Tables and lists of facts, printed by `rich` and rendered as HTML by the page's template."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table as TerminalTable

from omnibal.base.printable import printable
from omnibal.report.formatting import percent

# Cells of a column: numbers (""), main numbers, names, wrapped text or signs.
Style = Literal["", "bold", "left", "wrap", "mark"]


@dataclass(frozen=True, slots=True)
class Marked:
    """Text with a class of report.css and a tooltip."""

    text: str
    css: str
    tip: str = ""

    @classmethod
    def share(cls, fraction: float) -> "Marked":
        """Return a share in percent, marked good up to 100 % and bad above."""
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
    sections: Sequence[Sequence[TableRow]]  # a terminal draws a rule between sections
    caption: str = ""
    keys: int = 1  # leading columns to repeat if a terminal is too narrow for all columns

    @classmethod
    def of_rows(
        cls,
        title: str,
        titles: Iterable[str | Column],
        *sections: Sequence[TableRow],
        caption: str = "",
        keys: int = 1,
    ) -> "Table":
        """Return a table of sections. A plain title makes a column of numbers."""
        columns = [head if isinstance(head, Column) else Column(title=head) for head in titles]
        return cls(title=title, columns=columns, sections=sections, caption=caption, keys=keys)

    @classmethod
    def of_columns(
        cls, title: str, columns: Sequence[tuple[Column, Sequence[Cell]]], caption: str = ""
    ) -> "Table":
        """Return a table of columns with their cells, short columns padded with empty cells."""
        heads, cells = zip(*columns, strict=True)
        return cls.of_rows(title, heads, [*zip_longest(*cells, fillvalue="")], caption=caption)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Group headings with their numbers of columns. Empty without groups."""
        names = groupby(column.group for column in self.columns)
        spans = [(name, len(list(group))) for name, group in names]
        return spans if any(name for name, _ in spans) else []

    @property
    def headings(self) -> list[str]:
        """Column titles on a terminal, with their group's above if there are several groups."""
        has_several = len({column.group for column in self.columns if column.group}) > 1
        return [f"{c.group}\n{c.title}" if has_several else c.title for c in self.columns]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[TerminalTable]:
        """Yield the table, in parts if it is too wide even with wrapped cells."""
        rows = [row for section in self.sections for row in section]
        cells = [
            [heading, *(printable(str(row[index])) for row in rows)]
            for index, heading in enumerate(self.headings)
        ]
        # Characters of the longest word (narrowest column) and of the longest line (widest).
        narrowest, widest = (
            [max(cell_len(text) for cell in column for text in split(cell)) for column in cells]
            for split in (lambda cell: [*cell.split(), ""], lambda cell: cell.split("\n"))
        )
        keys = list(range(self.keys))
        parts = [keys]
        for index in range(self.keys, len(cells)):
            if _free_width(options, [*parts[-1], index], narrowest) < 0 and parts[-1] != keys:
                parts.append(keys)
            parts[-1] = [*parts[-1], index]
        for number, part in enumerate(parts):
            widths = {index: narrowest[index] for index in part}
            free = _free_width(options, part, narrowest)
            # Columns that need little more come first, so that most get all they need.
            for index in sorted(part, key=lambda index: widest[index] - narrowest[index]):
                more = max(min(widest[index] - narrowest[index], free), 0)
                widths[index], free = narrowest[index] + more, free - more
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


def _free_width(options: ConsoleOptions, columns: Sequence[int], widths: Sequence[int]) -> int:
    """Return the characters of a line that `columns` of these widths leave free."""
    # Two characters between columns.
    return options.max_width - 2 * len(columns) - sum(widths[index] for index in columns)


@dataclass(frozen=True, slots=True)
class Facts:
    title: str
    entries: Sequence[tuple[str, str | Marked]]

    @classmethod
    def of(cls, title: str, entries: Mapping[str, str | Marked | None]) -> "Facts":
        """Return the entries whose value is neither None nor empty."""
        return cls(title, [(name, value) for name, value in entries.items() if value])

    def __rich__(self) -> Table:
        return Table.of_rows(self.title, (Column(title="", style="left"), ""), self.entries)
