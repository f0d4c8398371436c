"""Deterministic figures by matplotlib, without pyplot's state, as SVG for light and dark pages."""

import html
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

WIDE, NARROW = 1080, 520  # widths of figures in pixels: full page and half page
_REPORT_FOLDER = Path(__file__).parent
_PALETTE = (_REPORT_FOLDER / "palette.css").read_text()
COLOURS: Mapping[str, str] = dict(re.findall(r"--(\w+): (#\w+);", _PALETTE.split("@media")[0]))
"""Light colours by their names in palette.css."""
_COLOUR_NAMES = {colour: name for name, colour in COLOURS.items()}
# A colour as an attribute (1, 2), or within a style (3).
_COLOUR = re.compile('(fill=)"(#[0-9a-f]{6})"|(?<=: )(#[0-9a-f]{6})')
# Needed in an SVG file, but not in an element of an HTML page.
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Decorator of functions that draw, and a context manager.
style = partial(rc_context, fname=_REPORT_FOLDER / "omnibal.mplstyle")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in pixels."""
    return Figure(figsize=(width / 72, height / 72))  # inches; SVG has 72 points per inch


def xml_text(text: str) -> str:
    """Return text with characters invalid in XML replaced by question marks."""
    return _NOT_XML.sub("?", text)


@style()
def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as an `svg` element coloured by palette.css, with `label` as its alt text."""
    file = StringIO()
    with warnings.catch_warnings():
        # Browsers take characters that this font lacks from another.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # A date would make equal reports differ in bytes.
        no_metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(file, format="svg", metadata=no_metadata)
    svg = file.getvalue()
    svg = _COLOUR.sub(_use_css_variable, svg[svg.index("<svg") :])
    head, body = svg.split(">", 1)
    size = " ".join(re.findall(r'(?:width|height|viewBox)="[\d. ]+"', head.replace("pt", "")))
    return f'<svg {size} role="img" aria-label="{html.escape(label)}">{body}'


def _use_css_variable(match: re.Match[str]) -> str:
    name = _COLOUR_NAMES.get(match[2] or match[3])
    if name is None:
        return match[0]
    # CSS variables work in styles, not in attributes.
    return f'style="fill: var(--{name})"' if match[1] else f"var(--{name})"


def svg_file(figure: Figure, title: str = "") -> str:
    """Return an SVG file for light and dark pages, titled like the figure by default."""
    title = title or figure.get_suptitle()
    head, body = to_svg(figure, title).removeprefix("<svg").split(">", 1)
    start = f"<svg {_NAMESPACES}{head}><title>{html.escape(title)}</title>\n"
    return f"{start}<style>{_PALETTE}</style>{body}"


def add_legend(figure: Figure, columns: int) -> None:
    """Add a joint legend above all axes."""
    pairs = [axes.get_legend_handles_labels() for axes in figure.axes]
    # One entry per label, though every bar of a series has it.
    handles = {label: handle for pair in pairs for handle, label in zip(*pair, strict=True)}
    figure.legend([*handles.values()], [*handles], loc="outside upper left", ncols=columns)


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label rows from the top: all, or the first and last of more than 24."""
    shown = range(len(names)) if len(names) <= 24 else (0, len(names) - 1)
    axes.set_yticks(list(shown), [names[row] for row in shown])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def make_logarithmic(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with ticks at 1, 2 and 5 times powers of 10."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
