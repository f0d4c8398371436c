"""Groups of options: dataclass parameters of a command, with a field per option."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

from omnibal.base.remote_path import check_local


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every group of options among a command's parameters by the group's fields.

    The command gets its groups with values, and URLs in path options are errors.

    >>> @dataclass
    ... class Sizes:
    ...     tp: int = 1
    ...     pp: int = 1
    >>> def plan(sizes: Sizes, output: str) -> None: ...
    >>> inspect.signature(with_groups(plan))
    <Signature (*, tp: int = 1, pp: int = 1, output: str) -> None>
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _parameters_of(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        check_local(given)
        filled = {
            name: group(**{one.name: given.pop(one.name) for one in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **filled)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def given_options(context: typer.Context) -> Iterator[tuple[Any, Any]]:
    """Yield the options on the command line, with their values."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield option, context.params[option.name or ""]


def _parameters_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(group)
    ]
