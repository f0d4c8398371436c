"""Variables of a launch script, and what words stand for with them; no command is run.

What is not known (a variable that the script does not set, the output of a command, what is set
under a condition) stands in a word as `UNKNOWN`, so that only who needs the value asks for it.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import add, mul, neg, pos, sub

from omnibal.base.errors import UserError
from omnibal.lint.shell_words import Piece, Word, pieces_of

UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
"""Mark of a value that is not known, around the name that `--set` takes."""
_PARAMETER = re.compile(
    r"(?P<name>\w+|[@*#?$!-])(?P<all>\[[@*]\])?(?:(?P<rule>:?[-=+?])(?P<other>.*))?", re.DOTALL
)
_NAME = re.compile(r"(?<![\w\ue000])[A-Za-z_]\w*(?![\w\ue001])")
_TEN_BASED = re.compile(r"(?<![\w#])10#(\d{1,18})(?!\w)")
"""A number that arithmetic is told to read in base ten, as one with leading zeros."""
_MOST_DIGITS, _MOST_SYMBOLS = 18, 1_000
"""Limits of arithmetic, as no count of a launch line comes near them: a shell has 64 bits, and
longer expressions are none that a parser should be given."""
_MOST_LETTERS = 2**20
"""Most letters of a variable's value: a launch line is far shorter, and values that double line by
line have no end."""
_NO_QUOTES = str.maketrans("", "", "\"'")


@dataclass(frozen=True, slots=True)
class Unset:
    """Why a variable's value is not known."""

    reason: str


Value = str | tuple[str, ...] | Unset
_NOT_SET = Unset("the script does not set it")


@dataclass(slots=True)
class Variables:
    """Variables by name, as far as the script was read."""

    given: Mapping[str, str]
    """Values of `--set`, which no assignment changes."""
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    possible: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Words of values that are set or added under a condition, by the variables' names."""
    conditions: dict[str, str] = field(default_factory=dict)
    """Line that last set a variable under a condition, and where it stands, in words."""

    def get(self, name: str) -> Value:
        """The value of a variable, or why it is not known."""
        if name in self.given:
            return self.given[name]
        return self.values.get(name, _NOT_SET)

    def assign(self, name: str, value: Value) -> None:
        """Set a variable.

        Raises:
            UserError: the value is too long.
        """
        if not isinstance(value, Unset) and sum(map(len, _parts(value))) > _MOST_LETTERS:
            raise UserError(
                f"the script gives {name} more than {_MOST_LETTERS:,} letters, which no launch "
                "line has; give the command alone"
            )
        self.values[name] = value

    def assign_perhaps(self, name: str, value: Value, where: str, is_added: bool) -> None:
        """Set a variable, or add to it, where a line may not be reached.

        It is known afterwards only if it had the same value before; what was known of a variable
        that is added to stays, with a mark for the rest.

        Args:
            where: which line does so, and why it may not be reached.
        """
        if not is_added and self.get(name) == value:
            return
        self.conditions[name] = where
        if not isinstance(value, Unset):
            words = " ".join(_parts(value)).split()
            self.possible[name] = (*self.possible.get(name, ()), *words)
        if not is_added:
            self.values[name] = Unset(where)
        elif _unknown(name) not in _texts(self.get(name)):
            mark = _unknown(name)
            self.assign(name, self.added(name, (mark,) if isinstance(value, tuple) else f" {mark}"))

    def added(self, name: str, value: Value) -> Value:
        """The value of a variable with another one added, as `+=` adds it."""
        before = self.get(name)
        if isinstance(before, Unset):
            return value if before is _NOT_SET else before
        if isinstance(value, tuple):
            return (*((before,) if isinstance(before, str) else before), *value)
        if isinstance(before, tuple) or isinstance(value, Unset):
            return value if isinstance(value, Unset) else (*before, value)
        return before + value

    def without_rest(self, name: str) -> str | None:
        """What a variable has for certain, where more is added that is not known; else None."""
        text, mark = _texts(self.get(name)), _unknown(name)
        return " ".join(text.replace(mark, " ").split()) if mark in text else None

    def forget(self, name: str, reason: str, words: tuple[str, ...] = ()) -> None:
        """Take a variable's value as not known from here on.

        Args:
            words: what it may hold besides the words that it held before.
        """
        held = _texts(self.get(name)).split()
        self.possible[name] = (*self.possible.get(name, ()), *held, *words)
        self.conditions.pop(name, None)
        self.values[name] = Unset(reason)

    def remove(self, name: str) -> None:
        """Take a variable as never set."""
        self.values.pop(name, None)
        self.conditions.pop(name, None)
        self.exported.discard(name)

    def listed(self, name: str) -> tuple[str, ...]:
        """What `--set` gives for an array: words as a shell reads them.

        Raises:
            UserError: a quote of it is not closed.
        """
        try:
            return tuple(shlex.split(self.given[name]))
        except ValueError as error:
            raise UserError(
                f"--set {name}={self.given[name]}: is the words of an array, whose quotes must be "
                "closed; correct it"
            ) from error

    def reason(self, name: str) -> str:
        """Why a value is not known."""
        value = self.get(name)
        if not re.fullmatch(r"\w+", name):
            return "it is the output of a command, and none is run"
        if name in self.conditions:
            return self.conditions[name]
        return value.reason if isinstance(value, Unset) else "it is made of such a value"


def _texts(value: Value) -> str:
    return "" if isinstance(value, Unset) else " ".join(_parts(value))


def expand(word: Word, variables: Variables) -> list[str]:
    """Words that a word becomes: unquoted expansions are split at blanks, arrays are all words."""
    fields: list[str] = []
    is_open = False
    for piece in word.pieces:
        values = _split(piece, variables)
        for number, (text, is_glued) in enumerate(values):
            if number == 0 and is_open and is_glued:
                fields[-1] += text
            else:
                fields.append(text)
        if values:
            is_open = True
            if not values[-1][0] and not piece.is_quoted and piece.is_expansion:
                fields.pop()
                is_open = False
    return fields


def _split(piece: Piece, variables: Variables) -> list[tuple[str, bool]]:
    """Parts of a piece, each with whether it may be glued to what stands before it.

    A last part that is empty says that what follows begins a new word.
    """
    if not piece.is_expansion:
        return [(piece.text, True)]
    value = evaluate(piece.text, variables)
    if piece.is_quoted:
        return [(part, number == 0) for number, part in enumerate(_parts(value))]
    text = " ".join(_parts(value))
    words: list[tuple[str, bool]] = [
        (part, number == 0 and not text[0].isspace()) for number, part in enumerate(text.split())
    ]
    return [*words, ("", False)] if words and text[-1].isspace() else words


def _parts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def joined(pieces: Iterable[Piece], variables: Variables) -> str:
    """One text of pieces that are not split, as in an assignment."""
    return "".join(
        " ".join(_parts(evaluate(piece.text, variables))) if piece.is_expansion else piece.text
        for piece in pieces
    )


def evaluate(expansion: str, variables: Variables) -> str | tuple[str, ...]:
    """What an expansion such as `${TP:-4}` stands for; several words for an array."""
    if expansion.startswith("$((") and expansion.endswith("))"):
        return _arithmetic(expansion[3:-2], variables)
    if expansion.startswith(("$(", "`")):
        return _unknown(expansion)
    if expansion.startswith("${"):
        return _parameter(expansion[2:-1], variables)
    return _known(expansion[1:], variables)


def _unknown(name: str) -> str:
    return f"\ue000{name}\ue001"


def _known(name: str, variables: Variables) -> str | tuple[str, ...]:
    value = variables.get(name)
    if name in ("@", "*"):
        return ()
    return _unknown(name) if isinstance(value, Unset) else value


def _parameter(text: str, variables: Variables) -> str | tuple[str, ...]:
    """Value of `${...}`, by the text between its braces."""
    match = _PARAMETER.fullmatch(text)
    if match is None:
        return _unknown(re.sub(r"^[#!]?(\w*).*", r"\1", text, flags=re.DOTALL))
    name, rule = match["name"], match["rule"]
    value = variables.get(name)
    if rule is None or rule.endswith("?"):
        if match["all"] and name in variables.given:
            return variables.listed(name)
        known = _known(name, variables)
        return known if match["all"] or isinstance(known, str) else known[:1] or ""
    is_set = value is not _NOT_SET and not (rule.startswith(":") and value in ("", ()))
    if rule.endswith("+"):
        return _other(match["other"], variables) if is_set else ""
    if is_set:
        return _known(name, variables)
    other = _other(match["other"], variables)
    if rule.endswith("="):
        variables.assign(name, other)
    return other


def _other(text: str, variables: Variables) -> str:
    """Value of what `${NAME:-...}` has behind its sign, without the quotes in it."""
    pieces = (
        piece if piece.is_expansion else Piece(piece.text.translate(_NO_QUOTES), True)
        for piece in pieces_of(text)
    )
    return joined(pieces, variables)


def _arithmetic(text: str, variables: Variables) -> str:
    """Value of `$((...))` on whole numbers, or the mark of the first name that is not known."""
    expression = joined(pieces_of(text), variables)
    expression = _NAME.sub(lambda match: " ".join(_parts(_known(match[0], variables))), expression)
    unknown = UNKNOWN.search(expression)
    if unknown is not None:
        return unknown[0]
    expression = _TEN_BASED.sub(lambda match: str(int(match[1])), expression)
    if len(expression) > _MOST_SYMBOLS or "#" in expression:
        return _unknown(f"$(({text}))")
    try:
        return str(_result(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return _unknown(f"$(({text}))")


def _divided(left: int, right: int) -> int:
    """Quotient rounded towards zero, as a shell has it."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_TWO: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: _divided,
    ast.Mod: lambda left, right: left - right * _divided(left, right),
}
_ONE: dict[type[ast.unaryop], Callable[[int], int]] = {ast.USub: neg, ast.UAdd: pos}


def _result(node: ast.expr) -> int:
    """Value of an expression of whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        value = _TWO[type(node.op)](_result(node.left), _result(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        value = _ONE[type(node.op)](_result(node.operand))
    else:
        raise ValueError("not whole numbers, + - * / and %")
    if abs(value) >= 10**_MOST_DIGITS:
        raise ValueError("too large")
    return value


def unknown_names(text: str) -> Iterator[str]:
    """Names of all values in a text that are not known."""
    return (match[1] for match in UNKNOWN.finditer(text))


def shown(text: str) -> str:
    """A text with what is not known as a shell writes it, such as `$TP`."""
    return UNKNOWN.sub(lambda match: f"${match[1]}".replace("$$", "$"), text)
