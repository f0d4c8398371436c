"""Option groups (dataclass parameters of a command, a field per option) and sectioned help."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand

from omnibal.base.remote_path import check_local

COUNT = "N"  # metavar of integer options
_FIRST = "--model --data lengths --cluster --gpus --lengths --samples-per-step --for --output"
_HELP_SECTIONS = {
    "Packs and steps": """--max-tokens --max-tiles --micro-batches --epochs --packing-levels |
        --limit --image-share --packing --seed --mixture --window --dispatch --curriculum-steps
        --steps-of --portion-samples""",
    "Parallel sizes (searched with --gpus, else 1)": "--tp --pp --dp --ep | --sequence-parallel",
    "Weights, stages and recomputation": """--freeze --lora-rank --sharding --recompute |
        --lora-alpha --lora-targets --lora-part --lora-rslora --encoder --schedule --method
        --precision""",
    "Costs": "--memory-gib --profile | --network-gb-per-s --expert-imbalance --compare",
}
"""Options by section of long help; --help-all adds the options after `|`."""
_SHOWS_ALL = "omnibal.help_all"
_NO_BREAK = "\N{NON-BREAKING HYPHEN}"  # click breaks lines at hyphens, which would cut options


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[_SHOWS_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="show all options")
]


class GroupedCommand(TyperCommand):
    """Command with examples (its epilog), and with sections of options if it has --help-all."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows, options = {}, cast(list[Any], self.get_params(ctx))
        for option in options:
            if option.metavar in (COUNT, "X", "GIB"):  # ranges would take a second line
                option.min = option.max = None
            name, text = option.get_help_record(ctx)
            rows[option.opts[0]] = name, text.replace("-", _NO_BREAK)
        sections = {"Options": " ".join(rows)}
        if "--help-all" in rows:
            in_sections = " ".join([_FIRST, *_HELP_SECTIONS.values()]).split()
            others = [name for name in rows if name not in in_sections]
            sections = {"Options": " ".join([_FIRST, *others])} | _HELP_SECTIONS
        for title, names in sections.items():
            usual, rare = (
                [n for n in part.split() if n in rows] for part in f"{names}|".split("|")[:2]
            )
            shown = usual + rare if _SHOWS_ALL in ctx.meta else usual or rare
            with formatter.section(title):
                formatter.write_dl([rows[name] for name in shown], col_max=22)
                if len(shown) < len(usual + rare):
                    formatter.write_text(f"more: {' '.join(rare)}".replace("-", _NO_BREAK))
            if title == "Options" and self.epilog:
                with formatter.section("Examples"):
                    # \b keeps click from wrapping the paragraph.
                    formatter.write_text(f"\b\n{inspect.cleandoc(self.epilog)}")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: examples follow the first options."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_NO_BREAK, "-")

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(limit=10_000)  # whole sentences in `omnibal --help`


def with_groups(command: Callable[..., None], without: str = "") -> Callable[..., None]:
    """Return a command with a parameter per field of its option groups, except field `without`.

    It calls `command` with filled groups, and raises UserError for a URL in a path option.

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
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=hints[field.name],
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(kind)
                if field.name != without
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

    # Typer reads the options from the signature and from the annotations.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def given_options(context: typer.Context) -> Iterator[tuple[Any, Any]]:
    """Yield options given on the command line (no defaults), with their values."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            yield option, context.params[option.name or ""]
