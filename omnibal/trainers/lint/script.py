"""Commands of a launch script with its variables substituted, without execution.

Supported are `NAME=value`, `export`, arrays (`NAME=( ... )`, `NAME+=( ... )`) and commands with
`$NAME`, `${NAME}`, `${NAME:-value}` and `"${NAME[@]}"`; `$@` is empty. Other syntax is a UserError.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from omnibal.base.errors import UserError

# Marks the name of an unset variable in a word; private-use characters occur in no script.
UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
# Possessive quantifiers (`*+`, `++`): no backtracking, so that no script takes exponential time.
_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*+\"|\\."
_COMMENT = r"(?<!\S)\#[^\n]*"
_LIST = rf"(?<==)\((?:{_QUOTED}|{_COMMENT}|[^()])*+\)"
_SCRIPT_LINE = re.compile(rf"(?:{_LIST}|{_QUOTED}|{_COMMENT}|[^\n])++", re.DOTALL)
_QUOTED_OR_DROPPED = re.compile(rf"({_QUOTED})|{_COMMENT}|\\\n", re.DOTALL)
_WORD = re.compile(rf"(?:{_LIST}|{_QUOTED}|\S)++", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = (
    r"\$(?:(?P<name>[A-Za-z_]\w*|[@*])"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?P<all>\[[@*]\])?(?::-(?P<other>[^{}]*))?\})"
)
_SHELL = r"(?P<shell>\$[({\d#?!$-]|`"
_UNQUOTED = re.compile(
    rf"'[^']*'|\\.|\"(?P<double>(?:\\.|[^\"\\])*+)\"|{_VARIABLE}|{_SHELL}|[|;&<>()])", re.DOTALL
)
_IN_DOUBLE = re.compile(rf"\\(?P<escaped>[$`])|\\.|{_VARIABLE}|{_SHELL})", re.DOTALL)
_SHELL_KEYWORDS = frozenset(
    "if then elif else fi for while until do done case esac select function { } [[ ! eval let read "
    "mapfile readarray unset declare local readonly typeset".split()
)
_ELEMENT = re.compile(r"\w+\[[^]]*\]\+?=")
_MAX_LETTERS = 2**16  # max characters of a value, as `X=$X$X` doubles it


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCommand:
    """A command; its environment has exported variables and assignments before it."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int  # first line in the script, from 1


def show_unknown(text: str) -> str:
    """Return text with marks of unset variables written as in a shell, such as `$TP`."""
    return UNKNOWN.sub(r"$\1", text)


def read_script(text: str, given: Mapping[str, str]) -> list[ScriptCommand]:
    """Return a script's commands, expanded; `given` variables override its own."""
    text = text.replace("\\\r\n", "\\\n")
    reader, commands = _ScriptReader(given), list[ScriptCommand]()
    for match in _SCRIPT_LINE.finditer(text):
        blanks = len(match[0]) - len(match[0].lstrip())
        line = text.count("\n", 0, match.start() + blanks) + 1
        commands += reader.read_line(_drop_comments(match[0]), line)
    return commands


def _drop_comments(text: str) -> str:
    # Drops line continuations too. Quoted text is matched, so that a # in it is no comment.
    return _QUOTED_OR_DROPPED.sub(lambda match: (match[1] or "").replace("\\\n", ""), text)


class _ScriptReader:
    """Reader of a script's lines, with the values of its variables so far."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given
        self.values: dict[str, tuple[str, ...]] = {}
        self.exported: set[str] = set()
        self.line = 1

    def read_line(self, text: str, line: int) -> Iterator[ScriptCommand]:
        """Store a line's assignments, or yield its command."""
        self.line, raw = line, _WORD.findall(text)
        is_export = raw[:1] == ["export"]
        if is_export:
            raw = raw[1:]
            self.exported.update(word.partition("=")[0] for word in raw)
        matches = [_ASSIGNMENT.fullmatch(word) for word in raw]
        # A command is what follows the leading assignments, which are then its environment.
        count = len(raw) if is_export or None not in matches else matches.index(None)
        assigned, command = [match for match in matches[:count] if match], raw[count:]
        if not command:
            for match in assigned:
                self.values[match[1]] = self._evaluate(match)
            return
        if command[0] in _SHELL_KEYWORDS or _ELEMENT.match(command[0]):
            self._refuse(command[0])
        words = tuple(word for raw_word in command for word in self._expand(raw_word))
        known = {**self.values, **{name: (value,) for name, value in self.given.items()}}
        exported = {name: " ".join(known[name]) for name in sorted(self.exported & known.keys())}
        before = {match[1]: " ".join(self._evaluate(match)) for match in assigned}
        if words:
            yield ScriptCommand(words=words, environment=exported | before, line=line)

    def _evaluate(self, match: re.Match[str]) -> tuple[str, ...]:
        """Return the value after an assignment: the words of an array, or one word."""
        name, is_added, text = match.groups()
        if text.startswith("(") and text.endswith(")"):
            raw = _WORD.findall(_drop_comments(text[1:-1]))
            value = tuple(word for raw_word in raw for word in self._expand(raw_word))
            value = self.values.get(name, ()) + value if is_added else value
        else:
            before = " ".join(self.values.get(name, ())) if is_added else ""
            value = (before + "".join(self._expand(text, splits=False)),)
        if sum(map(len, value)) > _MAX_LETTERS:
            raise UserError(f"{name} has more than {_MAX_LETTERS:,} letters; give only the command")
        return value

    def _expand(self, raw: str, splits: bool = True) -> list[str]:
        """Return the words that a raw word expands to; unquoted values split at blanks."""

        def substitute(match: re.Match[str]) -> str:
            if match["shell"]:
                self._refuse(match["shell"])
            if match["double"] is not None:
                return self._expand_double(match["double"])
            if not (match["name"] or match["braced"]):
                return match[0]
            value = " ".join(self._look_up(match))
            if not splits:
                return shlex.quote(value)
            return re.sub(r"\S+", lambda run: shlex.quote(run[0]), value)

        text = _UNQUOTED.sub(substitute, raw)
        try:
            return shlex.split(text)
        except ValueError as error:
            raise UserError(
                f"line {self.line} of the launch line or script has an open quote or backslash"
            ) from error

    def _expand_double(self, text: str) -> str:
        """Return double-quoted text expanded, for `shlex.split`; an array makes several words."""

        def substitute(match: re.Match[str]) -> str:
            if match["shell"]:
                self._refuse(match["shell"])
            if not (match["name"] or match["braced"]):
                return match["escaped"] or match[0]
            words = self._look_up(match)
            return '" "'.join(re.sub(r'(["\\])', r"\\\1", word) for word in words)

        # "${NAME[@]}" of an empty array is no word, not an empty one.
        only = _IN_DOUBLE.fullmatch(text)
        if only and (only["name"] or only["all"]) and not self._look_up(only):
            return ""
        return f'"{_IN_DOUBLE.sub(substitute, text)}"'

    def _look_up(self, match: re.Match[str]) -> tuple[str, ...]:
        """Return a variable's words, or its mark if unset."""
        name, is_all = match["name"] or match["braced"], bool(match["all"])
        if name in ("@", "*"):
            return ()
        if name in self.given:
            return tuple(self._expand(self.given[name])) if is_all else (self.given[name],)
        value = self.values.get(name)
        if match["other"] is not None and value in (None, (), ("",)):
            return ("".join(self._expand(match["other"], splits=False)),)
        if value is None:
            return (f"\ue000{name}\ue001",)
        return value if is_all else value[:1]

    def _refuse(self, text: str) -> NoReturn:
        raise UserError(
            f"line {self.line} of the launch line or script has {text}, and only assignments, "
            "${NAME:-value}, arrays and plain commands are read: quote it, or use `bash -x SCRIPT`"
        )
