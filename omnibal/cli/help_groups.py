"""Groups of options: dataclass parameters of a command, with a field per option; their help."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand

from omnibal.base.remote_path import check_local

COUNT = "N"
"""Metavar of integer options. Help leaves their ranges out."""
_FIRST = "--model --data lengths --cluster --gpus --lengths --samples-per-step --for --output"
_SECTIONS = {
    "Packs and steps": """--max-tokens --max-tiles --micro-batches --epochs --packing-levels |
        --limit --image-share --packing --seed --mixture --window --dispatch --curriculum-steps
        --steps-of --portion-samples""",
    "Parallel sizes (searched with --gpus, else 1)": "--tp --pp --dp --ep | --sequence-parallel",
    "Weights, stages and recomputation": """--freeze --lora-rank --sharding --recompute |
        --lora-alpha --lora-targets --lora-part --lora-rslora --encoder --schedule --method
        --precision""",
    "Costs": "--memory-gib --profile | --network-gb-per-s --expert-imbalance --compare",
}
"""Sections of long help: options that it shows, and options that --help-all adds."""
_SHOWS_ALL = "omnibal.help_all"
_WHOLE = "\N{NON-BREAKING HYPHEN}"
"""Hyphen that ends no line of help."""


def _show_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        context.meta[_SHOWS_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="show all options")
]


class Command(TyperCommand):
    """A command with examples (its epilog). Options are in sections if it has --help-all."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows, options = {}, cast(list[Any], self.get_params(ctx))
        for option in options:
            if option.metavar == COUNT:
                option.min = option.max = None
            name, text = option.get_help_record(ctx)
            rows[option.opts[0]] = name, text.replace("-", _WHOLE)
        sections = {"Options": " ".join(rows)}
        if "--help-all" in rows:
            listed = " ".join([_FIRST, *_SECTIONS.values()]).split()
            others = [name for name in rows if name not in listed]
            sections = {"Options": " ".join([_FIRST, *others])} | _SECTIONS
        for title, names in sections.items():
            usual, rare = (
                [n for n in part.split() if n in rows] for part in f"{names}|".split("|")[:2]
            )
            shown = usual + rare if _SHOWS_ALL in ctx.meta else usual or rare
            with formatter.section(title):
                formatter.write_dl([rows[name] for name in shown], col_max=22)
                if len(shown) < len(usual + rare):
                    formatter.write_text(f"more: {' '.join(rare)}".replace("-", _WHOLE))
            if title == "Options" and self.epilog:
                with formatter.section("Examples"):
                    formatter.write_text(f"\b\n{inspect.cleandoc(self.epilog)}")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: examples follow the first options."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_WHOLE, "-")

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(limit=10_000)


def with_groups(command: Callable[..., None], without: str = "") -> Callable[..., None]:
    """Replace every group of options among a command's parameters by the group's fields.

    The command gets its groups with values, and URLs in path options are errors. The field
    `without` is no option of the command.

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
            hints = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(
                    one.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[one.name],
                    default=inspect.Parameter.empty if one.default is MISSING else one.default,
                )
                for one in fields(kind)
                if one.name != without
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        check_local(given)
        filled = {
            name: group(**{f.name: given.pop(f.name) for f in fields(group) if f.name in given})
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
