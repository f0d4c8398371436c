"""Renamed options of `omnibal plan`, translated so that older scripts still run."""

from collections.abc import Sequence

_OPTIONS = {"--levels": "--packing-levels"}
_VALUES = {("--encoder", "beside"): "data-parallel"}


def with_current_names(arguments: Sequence[str]) -> list[str]:
    """Replace renamed options and values.

    >>> with_current_names(["plan", "--levels", "2", "--encoder=beside"])
    ['plan', '--packing-levels', '2', '--encoder=data-parallel']
    """
    if "plan" not in arguments[:1]:
        return list(arguments)
    current: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals:
            current.append(f"{_OPTIONS.get(name, name)}={_VALUES.get((name, value), value)}")
        else:
            option = current[-1] if current else ""  # `argument` may be its value
            current.append(_VALUES.get((option, argument), _OPTIONS.get(argument, argument)))
    return current
