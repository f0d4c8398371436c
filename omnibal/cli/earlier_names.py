"""Earlier names of options, still read: scripts that have them go on as they were."""

from collections.abc import Sequence

_OPTIONS = {"--levels": "--packing-levels"}
_VALUES = {("--encoder", "beside"): "data-parallel"}
_COMMAND = "plan"


def with_current_names(arguments: Sequence[str]) -> list[str]:
    """Replace earlier names of options.

    >>> with_current_names(["plan", "--levels", "2", "--encoder=beside"])
    ['plan', '--packing-levels', '2', '--encoder=data-parallel']
    """
    if _COMMAND not in arguments[:1]:
        return list(arguments)
    found: list[str] = []
    for argument in arguments:
        name, joined, value = argument.partition("=")
        if joined:
            found.append(f"{_OPTIONS.get(name, name)}={_VALUES.get((name, value), value)}")
        else:
            before = found[-1] if found else ""
            found.append(_VALUES.get((before, argument), _OPTIONS.get(argument, argument)))
    return found
