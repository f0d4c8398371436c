"""Commands of a launch script, in order, with their variables put in; nothing is executed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from omnibal.base.errors import UserError
from omnibal.lint.shell_values import Value, Variables, expand, joined
from omnibal.lint.shell_words import ARRAY, Piece, Token, Word, scan

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_DECLARE = frozenset(("export", "declare", "local", "readonly", "typeset"))
_OPENS = frozenset(("if", "while", "until", "for", "select", "case", "function", "{"))
_CLOSES = frozenset(("fi", "done", "esac", "}"))
_READS = frozenset(("read", "mapfile", "readarray"))
"""Commands that set variables to what they read."""
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[.*\]\+?=", re.DOTALL)
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""Names that arithmetic sets."""
_PLACES = dict.fromkeys(("for", "while", "until", "select"), "in a loop") | dict.fromkeys(
    ("function", "{"), "in a function"
)
_GOES_ON = frozenset(("then", "else", "elif", "do", "!"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A simple command: its words and what stands in its environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Exported variables of the script and assignments before the command."""
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Commands of a script, and its variables at its end."""

    commands: tuple[Command, ...]
    variables: Variables


def read_script(text: str, given: Mapping[str, str]) -> Script:
    """Read a script, or one command, as a shell would without running anything.

    Args:
        given: values of variables, by name, that stand above the script's own.

    Raises:
        UserError: a quote or a bracket is not closed, or values grow without end.
    """
    reader = _Reader(Variables(given))
    try:
        reader.read(scan(text))
    except RecursionError as error:
        raise UserError(
            "the launch line or script nests its brackets too deeply; give the command alone"
        ) from error
    return Script(commands=tuple(reader.commands), variables=reader.variables)


class _Reader:
    """What is known of a script up to a token."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.commands: list[Command] = []
        self.opened: list[str] = []
        """Reserved words that are not closed, from the outermost."""
        self.last_operator = "\n"
        self.above: list[dict[str, Value]] = []
        """Variables of the shells around a subshell, from the outermost."""

    def read(self, tokens: list[Token]) -> None:
        words: list[Word] = []
        array: tuple[Word, list[Word]] | None = None
        for token in tokens:
            if array is not None:
                array = self._in_array(token, array)
            elif isinstance(token, Word) and token.pieces[-1] == Piece(ARRAY, False, True):
                array = (token, [])
            elif isinstance(token, Word):
                words.append(token)
            else:
                self._command(words)
                words, self.last_operator = [], token
                self._subshell(token)
        self._command(words)

    def _subshell(self, operator: str) -> None:
        """Keep what a subshell is given, and take it back at the subshell's end."""
        if operator == "(":
            self.above.append(dict(self.variables.values))
        elif operator == ")" and self.above:
            self.variables.values = self.above.pop()

    def _in_array(
        self, token: Token, array: tuple[Word, list[Word]]
    ) -> tuple[Word, list[Word]] | None:
        """Take one more value of an array, or set it at its end."""
        name, values = array
        if isinstance(token, Word):
            return name, [*values, token]
        if token != ")":
            return array
        value = tuple(part for word in values for part in expand(word, self.variables))
        literal = "".join(piece.text for piece in name.pieces[:-1])
        self._set(literal, value, name.line)
        return None

    def _set(self, before: str, value: Value, line: int) -> None:
        match = _ASSIGNMENT.match(before)
        assert match is not None, before
        name, is_added = match[1], bool(match[2])
        where = self._may_be_left_out()
        if where:
            reason = f"line {line} sets it {where}"
            self.variables.assign_perhaps(name, value, reason, is_added)
        else:
            self.variables.assign(name, self.variables.added(name, value) if is_added else value)

    def _may_be_left_out(self) -> str:
        """Why what stands here may not be reached, in words; empty where it is."""
        if self.opened:
            return _PLACES.get(self.opened[-1], "under a condition")
        return "under a condition" if self.last_operator in ("&&", "||") else ""

    def _command(self, words: list[Word]) -> None:
        """Take a simple command: keep it, or set what it assigns."""
        words = self._without_control(words)
        assigned, rest = _assignments(words)
        if not rest:
            for word in assigned:
                self._assign(word)
            return
        if self._sets(rest):
            return
        texts = [text for word in rest for text in expand(word, self.variables)]
        is_pattern = self.opened[-1:] == ["case"] and texts[:1] and texts[0].startswith("-")
        if texts and not is_pattern:
            self.commands.append(
                Command(
                    words=tuple(texts),
                    environment=self._environment() | dict(map(self._pair, assigned)),
                    line=words[0].line,
                )
            )

    def _sets(self, words: list[Word]) -> bool:
        """Whether a command is one that sets variables, of which nothing is run; take what it
        sets."""
        name, line = words[0].literal, words[0].line
        text = "".join(piece.text for piece in words[0].pieces)
        element = _ELEMENT.match(text)
        if name in _DECLARE:
            self._declare(words)
        elif name == "unset":
            self._unset(words[1:])
        elif name == "let" or text.startswith("(("):
            written = " ".join(piece.text for word in words for piece in word.pieces)
            for match in _CHANGED.finditer(written):
                self.variables.forget(match[1] or match[2], f"line {line} computes it")
        elif element is not None and not words[0].pieces[0].is_quoted:
            new = tuple(part for word in words for part in expand(word, self.variables))
            value = (text[element.end() :], *new[1:])
            self.variables.forget(element[1], f"line {line} sets one of its values", value)
        elif name in _READS or (name == "printf" and len(words) > 2 and words[1].literal == "-v"):
            for word in words[1:] if name in _READS else words[2:3]:
                if re.fullmatch(r"[A-Za-z_]\w*", word.literal or ""):
                    self.variables.forget(word.literal or "", f"line {line} reads or prints it")
        else:
            return False
        return True

    def _unset(self, words: list[Word]) -> None:
        for word in words:
            name = word.literal or ""
            where = self._may_be_left_out()
            if where:
                self.variables.forget(name, f"line {word.line} unsets it {where}")
            else:
                self.variables.remove(name)

    def _without_control(self, words: list[Word]) -> list[Word]:
        """Words behind reserved ones, whose nesting is counted."""
        while words and words[0].literal is not None:
            reserved = words[0].literal
            if reserved in _OPENS:
                self.opened.append(reserved)
                words = self._without_loop(words) if reserved in ("for", "select") else words[1:]
                if reserved in ("case", "function"):
                    return []
            elif reserved in _CLOSES:
                del self.opened[-1:]
                words = words[1:]
            elif reserved in _GOES_ON:
                words = words[1:]
            else:
                break
        return words

    def _without_loop(self, words: list[Word]) -> list[Word]:
        name = words[1].literal if len(words) > 1 else None
        if name is not None:
            reason = f"line {words[0].line} sets it in a loop"
            self.variables.assign_perhaps(name, (), reason, False)
        return []

    def _declare(self, words: list[Word]) -> None:
        """Take `export NAME=VALUE` and the like."""
        for word in words[1:]:
            before = "".join(piece.text for piece in word.pieces)
            if words[0].literal == "export":
                self.variables.exported.add(before.partition("=")[0])
            if _assignment(word):
                self._assign(word)

    def _assign(self, word: Word) -> None:
        self._set(word.pieces[0].text, self._pair(word)[1], word.line)

    def _pair(self, word: Word) -> tuple[str, str]:
        match = _assignment(word)
        assert match is not None, word
        value = Piece(match.string[match.end() :], False)
        return match[1], joined((value, *word.pieces[1:]), self.variables)

    def _environment(self) -> dict[str, str]:
        values = {name: self.variables.get(name) for name in sorted(self.variables.exported)}
        return {name: value for name, value in values.items() if isinstance(value, str)}


def _assignment(word: Word) -> re.Match[str] | None:
    """Name and sign of an assignment; None where a word is none."""
    first = word.pieces[0] if word.pieces else None
    is_plain = first is not None and not first.is_quoted and not first.is_expansion
    return _ASSIGNMENT.match(word.pieces[0].text) if is_plain else None


def _assignments(words: list[Word]) -> tuple[list[Word], list[Word]]:
    assigned = list(takewhile(_assignment, words))
    return assigned, words[len(assigned) :]
