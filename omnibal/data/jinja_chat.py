"""Render Jinja chat templates as Transformers does, without importing it (and torch).

A checkpoint's template is untrusted code. A rendering is limited in iterations, macro and block
calls, and characters: unlike a time limit, it ends alike on every machine.
"""

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from types import BuiltinMethodType, FunctionType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from omnibal.base.errors import UserError

BEGIN, END = "\U000f0000", "\U000f0001"  # marks of generation blocks; absent from ordinary text
# Limits of a rendering: iterations, macro and block calls, and text written or joined.
_MAX_ITERATIONS, _MAX_CHARACTERS = 1_000_000, 50_000_000
_MAX_BITS, _SIZED = 4096, (str, bytes, list, tuple)  # of a product or power; types that may grow
# Max characters that a rendering's filters and methods read; characters counted per list item.
_MAX_READ, _ITEM = 300_000_000, 100
_REMOVED = ("lipsum", "pprint", "random", "urlize", "wordwrap")  # slow, or random
# Filters and methods whose result grows with a number among their arguments.
_PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "slice", "batch", "tojson"}
_FORMATTING = {"format", "format_map", "remainder"}
_WIDE_FORMAT = re.compile(r"[%{][^%a-z}]*(?:\d{5}|[*{])")  # a width of 5 digits or by argument


def render_chat(
    chat: "CompiledTemplate",
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: list | None = None,
    prompt: bool = False,
    pieces: Mapping[str, str] | None = None,
) -> str:
    """Return messages, marked by BEGIN and END, and a header if `prompt`; raises any exception.

    `pieces` are special tokens by their names in the template, such as "eos_token".
    """
    chat.rounds = chat.characters = chat.read = 0
    return chat.template.render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=prompt,
        **(pieces or {}),
    )


@functools.lru_cache(maxsize=16)
def packaged_template(name: str) -> "CompiledTemplate":
    path = files("omnibal").joinpath("data", "templates", f"{name}.jinja")
    return compiled_template(path.read_text("utf-8"), str(path))


@functools.lru_cache(maxsize=16)
def compiled_template(template: str, path: str) -> "CompiledTemplate":
    """Compile a template with limits. Raise UserError, which names `path`, if it is not Jinja."""
    chat = CompiledTemplate()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=chat.output,
    )
    for name in _REMOVED:
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.filters = {
        **{name: chat.limit(operation, name) for name, operation in environment.filters.items()},
        _COUNT_ROUND: chat.count_round,
        _JOIN: chat.join,
        "tojson": chat.limit(_to_json, "tojson"),
    }
    environment.call = chat.limit(environment.call)  # type: ignore[method-assign]
    environment.intercepted_binops = frozenset(_OPERATORS)
    environment.call_binop = chat.operate  # type: ignore[method-assign, assignment]
    # No strftime_now, on purpose: tokens must not depend on the date.
    environment.globals["raise_exception"] = _stop_rendering
    try:
        # Like `from_string`, but with globals in a single table, which halves rendering time.
        code = environment.compile(_CountRuns().visit(environment.parse(template)))
        chat.template = jinja2.Template.from_code(environment, code, dict(environment.globals))
        return chat
    except jinja2.TemplateSyntaxError as error:
        why = f"{error.message}, line {error.lineno}"
    except (RecursionError, SyntaxError, MemoryError):
        why = "nested too deep"
    raise UserError(f"{path}: its chat template is not Jinja ({why}); restore the checkpoint's own")


@dataclass(slots=True)
class CompiledTemplate:
    """Template, counters of its current rendering, and operations that keep to their limits."""

    template: jinja2.Template = field(init=False)
    rounds: int = 0  # iterations, macro and block calls
    characters: int = 0  # written or joined
    read: int = 0  # characters read by filters and calls, or added by padding

    def count(self, characters: int) -> None:
        self.characters += max(0, characters)
        if self.characters > _MAX_CHARACTERS:
            _stop_rendering(f"it writes more than {_MAX_CHARACTERS:,} characters")

    def limit(self, operation: Callable[..., Any], name: str = "call") -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(*arguments: Any, **named: Any) -> Any:
            self.check(name, (*arguments, *named.values()))
            result = operation(*arguments, **named)
            if isinstance(result, _SIZED) and len(result) > _MAX_CHARACTERS:
                self.count(len(result))
            return result

        return call

    def check(self, name: str, arguments: Sequence[Any]) -> None:
        """Raise TemplateError if a filter or call would read or write too much."""
        if name == "call":
            called, name = arguments[1], ""
            if isinstance(called, FunctionType) and "__wrapped__" in vars(called):
                called = vars(called)["__wrapped__"]  # str.format, in the sandbox's wrapper
            if isinstance(called, BuiltinMethodType):
                name, arguments = called.__name__, (called.__self__, *arguments[2:])
        sized = [value for value in arguments if isinstance(value, _SIZED)]
        items = [item for value in sized if isinstance(value, list | tuple) for item in value]
        texts = [value for value in (*sized, *items) if isinstance(value, str)]
        self.read += _ITEM * len(items) + sum(map(len, texts))
        if name == "replace" and len(texts) >= 3:
            self.read += texts[0].count(texts[1]) * len(texts[2])
        elif name in _PADDING:
            # The first argument is the value itself, as of `1700000000 | tojson`.
            numbers = [abs(number) for number in arguments[1:] if isinstance(number, int)]
            lengths = [1 + len(text) for text in sized]
            self.read += max(numbers, default=0) * math.prod(lengths)
        elif name in _FORMATTING and texts and _WIDE_FORMAT.search(texts[0]):
            _stop_rendering("a format has a width above 9,999, or one that is an argument")
        if self.read > _MAX_READ:
            _stop_rendering(f"its filters and calls process more than {_MAX_READ:,} characters")

    @jinja2.pass_context  # else Jinja writes constants without a call
    def output(self, context: Context | None, value: Any) -> str:
        """Return the text that an expression writes, and count it."""
        text = str(value)
        self.count(len(text))
        return text

    @jinja2.pass_context  # else Jinja calls it when it compiles
    def count_round(self, context: Context, characters: int) -> None:
        """Count an iteration, macro or block call, and the `characters` of its literal text."""
        self.rounds += 1
        if self.rounds > _MAX_ITERATIONS:
            _stop_rendering(f"it runs more than {_MAX_ITERATIONS:,} iterations and macro calls")
        self.count(characters)

    def join(self, *values: Any) -> str:
        return self.output(None, "".join(map(str, values)))

    def operate(self, context: Context, symbol: str, left: Any, right: Any) -> Any:
        """Return the result of an operator in `_OPERATORS`, unless it would be too large."""
        items, times = (left, right) if isinstance(left, _SIZED) else (right, left)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits_of = {"*": bits + right.bit_length(), "**": bits * abs(right)}
            if bits_of.get(symbol, 0) > _MAX_BITS:
                _stop_rendering(f"the result of {symbol} may be too large")
        elif symbol == "*" and isinstance(items, _SIZED) and isinstance(times, int):
            self.count(len(items) * times)
        elif symbol == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            self.count(len(left) + len(right))
        elif symbol == "%":  # also formats text
            return self.limit(operator.mod, "remainder")(left, right)
        return _OPERATORS[symbol](left, right)


_OPERATORS = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}
_COUNT_ROUND, _JOIN = "_count_round", "_join"  # filters that templates cannot name


class _CountRuns(NodeTransformer):
    """Count runs of loops, macros and blocks, and text joined by `~`, by added filters."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> nodes.Node:
        super().generic_visit(node, *arguments, **named)
        if isinstance(node, nodes.For | nodes.Macro | nodes.Block):
            written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_call_filter(_COUNT_ROUND, nodes.Const(written))))
        elif isinstance(node, nodes.Concat):
            return _call_filter(_JOIN, *node.nodes)
        return node


def _call_filter(name: str, *operands: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(operands[0], name, list(operands[1:]), [], None, None)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a call that adds marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _stop_rendering(message: str) -> None:
    raise jinja2.TemplateError(message)
