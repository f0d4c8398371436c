"""Render Jinja chat templates as Transformers does, without importing it (and torch)."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnibal.base.errors import UserError

# Private-use characters, absent from ordinary text.
BEGIN, END = "\U000f0000", "\U000f0001"


def render_chat(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: list | None = None,
    prompt: bool = False,
    pieces: Mapping[str, str] | None = None,
) -> str:
    """Render messages. Templates may raise any exception.

    Args:
        prompt: append the beginning of an answer.
        pieces: tokens by role, such as "eos_token".
    """
    return template.render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=prompt,
        **(pieces or {}),
    )


@lru_cache(maxsize=16)
def packaged_template(name: str) -> jinja2.Template:
    path = files("omnibal").joinpath("data", "templates", f"{name}.jinja")
    return compiled_template(path.read_text("utf-8"), str(path))


@lru_cache(maxsize=16)
def compiled_template(template: str, path: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # No strftime_now, on purpose: tokens must not depend on the date.
    environment.globals["raise_exception"] = _refuse
    try:
        # Like `from_string`, but with globals in a single table, which halves rendering time.
        code = environment.compile(template)
        return jinja2.Template.from_code(environment, code, dict(environment.globals))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{path}: its chat template is not Jinja ({error.message}, line {error.lineno}); "
            "restore the checkpoint's own"
        ) from error


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


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
