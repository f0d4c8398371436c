"""Renamed options, accepted for one release so that older scripts still run."""

from collections.abc import Sequence

_OPTIONS = {"plan": {"--levels": "--packing-levels"}, "pack": {"--method": "--packing"}}
_VALUES = {("--encoder", "beside"): "data-parallel"}


def with_current_names(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace renamed options and values; return the arguments, and a note per replacement.

    >>> with_current_names(["plan", "--levels", "2", "--encoder=beside"])[0]
    ['plan', '--packing-levels', '2', '--encoder=data-parallel']
    """
    current, notes = list(arguments), list[str]()
    options = _OPTIONS.get(arguments[0] if arguments else "", {})
    for place, argument in enumerate(arguments if options else ()):
        name, equals, value = argument.partition("=")
        option, given = (name, value) if equals else (arguments[place - 1], argument)
        new = _VALUES.get((option, given), given)
        current[place] = f"{options.get(name, name)}={new}" if equals else options.get(new, new)
        if current[place] != argument:
            before = "" if argument.startswith("--") else f"{option} "
            notes.append(f"{before}{argument} is now {before}{current[place]}")
    return current, notes
