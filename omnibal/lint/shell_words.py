"""Shell text as words and operators, of which nothing is executed.

Enough of POSIX shell and bash to read launch scripts: quotes, escapes, continued lines, comments,
expansions, redirections, here-documents and array assignments. What an expansion stands for is
`shell_values`' business.
"""

import re
from dataclasses import dataclass

from omnibal.base.errors import UserError

_SKIPPED = re.compile(r"[ \t\r]+|\\\n|#[^\n]*")
"""Blanks, the end of a line that goes on, and a comment."""
_ENDS_WORD = " \t\r\n;&|()<>"
_PLAIN = re.compile(r".[^ \t\r\n;&|()<>'\"\\$`]*", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>|&>|>>|>\||>&|<&|[<>])[ \t\r]*")
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
_NAME = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_OPENS_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_PAIRS = {"(": ")", "{": "}"}
ARRAY = "=("
"""Piece that ends the name of an array; its values are the words up to `)`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word: its own text, or an expansion as it is written, such as `${TP:-1}`."""

    text: str
    is_quoted: bool
    is_expansion: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, made of pieces without a blank between them."""

    pieces: tuple[Piece, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The word's text where it is neither quoted nor expanded, as names of assignments and
        reserved words are; None otherwise."""
        if any(piece.is_quoted or piece.is_expansion for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces)


Operator = str
"""What stands between commands, or opens a subshell: `;`, `&&`, `(`, a line's end and the like."""
Token = Word | Operator


def scan(text: str) -> list[Token]:
    """Read shell text as words and operators.

    Raises:
        UserError: a quote or an expansion is not closed.
    """
    return _Scanner(text).tokens()


def pieces_of(text: str) -> tuple[Piece, ...]:
    """Read text as the inside of double quotes: expansions, and all else as it stands."""
    return tuple(_Scanner(text).quoted(len(text)))


class _Scanner:
    """A place in a text that moves on as tokens are read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\\\r\n", "\\\n"), 0
        self.documents: list[str] = []

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while self.at < len(self.text):
            skipped = _SKIPPED.match(self.text, self.at)
            redirection = _REDIRECTION.match(self.text, self.at)
            if skipped is not None:
                self.at = skipped.end()
            elif redirection is not None:
                self._skip_redirection(redirection)
            else:
                found.append(self._arithmetic() or self._operator() or self._word())
        return found

    def _arithmetic(self) -> Word | None:
        """A command `((...))` as one word."""
        if not self.text.startswith("((", self.at):
            return None
        end = self._closing_bracket(self.at) + 1
        if not self.text.startswith("))", end - 2):
            return None  # two subshells
        word = Word((Piece(self.text[self.at : end], False, True),), self.line)
        self.at = end
        return word

    def _skip_redirection(self, match: re.Match[str]) -> None:
        self.at = match.end()
        target = self._word() if self.text[self.at : self.at + 1] not in ("", "\n") else None
        if target is not None and match[1] in ("<<", "<<-"):
            self.documents.append("".join(piece.text for piece in target.pieces))

    def _operator(self) -> Operator | None:
        match = _OPERATOR.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        if match[0] == "\n":
            self._skip_documents()
        return match[0]

    def _skip_documents(self) -> None:
        """Go on behind the here-documents that the last line announced."""
        for end in self.documents:
            lines = self.text[self.at :].splitlines(keepends=True)
            rest = next((i for i, line in enumerate(lines) if line.strip() == end), len(lines))
            self.at += sum(map(len, lines[: rest + 1]))
        self.documents.clear()

    def _word(self) -> Word:
        line, pieces = self.line, []
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD:
            pieces += self._piece()
        word = Word(tuple(pieces), line)
        opens = word.literal is not None and _OPENS_ARRAY.match(word.literal)
        if opens and self.text.startswith("(", self.at):
            self.at += 1
            return Word((*pieces, Piece(ARRAY, False, True)), line)
        return word

    def _piece(self) -> list[Piece]:
        letter = self.text[self.at]
        if letter == "'" or self.text.startswith("$'", self.at):
            start = self.at + (1 if letter == "'" else 2)
            end = self._find("'", start)
            self.at = end + 1
            return [Piece(self.text[start:end], True)]
        if letter == '"':
            self.at += 1
            pieces = self.quoted(self._closing_quote())
            self.at += 1
            return pieces or [Piece("", True)]
        if letter == "\\":
            escaped = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            return [] if escaped == "\n" else [Piece(escaped, True)]
        return [self._expansion(False) or self._plain()]

    def _plain(self) -> Piece:
        match = _PLAIN.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return Piece(match[0], False)

    def quoted(self, end: int) -> list[Piece]:
        """Pieces up to a place, as those within double quotes."""
        pieces, plain = [], ""
        while self.at < end:
            expansion = self._expansion(True)
            if expansion is not None:
                pieces += [*([Piece(plain, True)] if plain else []), expansion]
                plain = ""
                continue
            pair = self.text[self.at : self.at + 2]
            is_escape = pair[0] == "\\" and pair[1:] in ('"', "\\", "$", "`", "\n")
            plain += pair[1:].replace("\n", "") if is_escape else pair[0]
            self.at += 2 if is_escape else 1
        return [*pieces, Piece(plain, True)] if plain else pieces

    def _expansion(self, is_quoted: bool) -> Piece | None:
        """The expansion that begins here, if one does."""
        end = self._end_of_expansion()
        if end is None:
            return None
        piece = Piece(self.text[self.at : end], is_quoted, True)
        self.at = end
        return piece

    def _end_of_expansion(self) -> int | None:
        if self.text[self.at] == "`":
            return self._find("`", self.at + 1) + 1
        if self.text.startswith(("$(", "${"), self.at):
            return self._closing_bracket(self.at + 1) + 1
        name = _NAME.match(self.text, self.at)
        return None if name is None else name.end()

    def _closing_quote(self) -> int:
        """Place of the double quote that ends the text here."""
        at = self.at
        while at < len(self.text) and self.text[at] != '"':
            if self.text.startswith(("$(", "${"), at):
                at = self._closing_bracket(at + 1)
            at += 2 if self.text[at] == "\\" else 1
        return at if at < len(self.text) else self._unclosed('"')

    def _closing_bracket(self, opening: int) -> int:
        """Place of the bracket that closes the one at a place, but for those in single quotes."""
        pair = (self.text[opening], _PAIRS[self.text[opening]])
        at, depth = opening, 0
        while at < len(self.text):
            if self.text[at] == "'" and pair[0] == "(":
                at = self._find("'", at + 1)
            depth += (self.text[at] == pair[0]) - (self.text[at] == pair[1])
            if depth == 0:
                return at
            at += 2 if self.text[at] == "\\" else 1
        return self._unclosed("$" + pair[0])

    def _find(self, letter: str, start: int) -> int:
        end = self.text.find(letter, start)
        return end if end >= 0 else self._unclosed(letter)

    def _unclosed(self, what: str) -> int:
        raise UserError(
            f"line {self.line} of the launch line or script opens {what} and does not close it; "
            "every quote and bracket must be closed: correct it"
        )
