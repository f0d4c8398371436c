"""Formatting of values as text: numbers with units, and escaping for SVG."""

import math
from collections.abc import Sequence
from pathlib import Path

from omnibal.base.files import atomic
from omnibal.model.parallel import Parallel

EN_DASH = "\N{EN DASH}"
ARROW = "\N{RIGHTWARDS ARROW}"


def shorten(value: str, limit: int) -> str:
    """Return text of at most `limit` characters, truncated with an ellipsis."""
    return value if len(value) <= limit else value[: limit - 3] + "..."


def number(value: float, digits: int = 3) -> str:
    """Format a number with at least `digits` significant digits, with an exponent only below 0.001.

    >>> number(1234.5), number(12.345), number(0.01234)
    ('1,234', '12.3', '0.0123')
    """
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def percent(fraction: float) -> str:
    """Format a fraction in percent, without a sign if rounded to 0."""
    return f"{100 * fraction:z.1f} %"


def change(value: float, base: float) -> str:
    """Format the relative change from `base` to `value` in percent, with sign."""
    # Adding 0.0 turns -0.0, of a difference that rounds to 0, into 0.0.
    return f"{round(100 * (value / base - 1), 1) + 0.0:+.1f} %"


def milliseconds(value: float, digits: int = 3) -> str:
    """Format a time, given in ms, in ms or, from 1 s, in s."""
    in_s = value >= 1000
    return f"{number(value / 1000 if in_s else value, digits)} {'s' if in_s else 'ms'}"


def change_ms(ms: float) -> str:
    """Format a difference in time, with sign."""
    return f"{'+' if ms > 0 else '-' if ms < 0 else ''}{milliseconds(abs(ms))}"


def gib_or_mib(gib: float) -> str:
    mib = 1024 * gib
    return f"{gib:.2f} GiB" if gib >= 1 else f"{mib:.3g} MiB" if mib < 100 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """Format a duration in its two leading units.

    >>> duration(11_700), duration(42.4)
    ('3 h 15 min', '42 s')
    """
    rounded = round(seconds)
    for size, unit, below_size, below in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if rounded >= size:
            return f"{rounded // size} {unit} {rounded % size // below_size} {below}"
    return f"{rounded} s"


def align_decimals(values: Sequence[float], at_least: int = 0) -> list[str]:
    """Format a column with equal decimals: about three significant digits of the maximum."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    largest = max(finite, default=0.0)
    # At most four decimals, one from 100 on and none from 1,000 on.
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
    decimals = max(at_least, min(decimals, 4) if largest < 100 else int(largest < 1000))
    return [f"{value:,.{decimals}f}" for value in values]


def write_ascii(page: str, path: Path) -> None:
    """Write HTML, SVG or a trace as ASCII with character references, creating directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_bytes(page.encode("ascii", "xmlcharrefreplace"))


def describe_sharding(parallel: Parallel, sharded: int) -> str:
    """Return words on the sharding of data-parallel encoders over `sharded` ranks."""
    if sharded == 1:
        return "replicated on every rank"
    copies = parallel.world_size // sharded
    in_copies = f", in {copies:,} copies" if copies > 1 else ""
    return f"sharded over {sharded:,} neighbouring ranks{in_copies}"
