"""Text safe to print: names from a stranger's data may hold control characters, URLs secrets."""

import re

_URL = r"[A-Za-z0-9]:/+"  # `Path` drops a slash
_IN = r"(?:[^\s'\"]|['\"](?=\w))"  # a quote before a letter is part of the URL
_PASSWORD = re.compile(rf"({_URL})(?:(?:(?!/){_IN}){{1,2000}}|[^/\s:@'\"]*:{_IN}{{,2000}})@")
_QUERY = re.compile(rf"({_URL}(?:[^\s?]*|[^\n?]{{,2000}}(?=\?[\w.~%-]+=))\?){_IN}+")  # signatures
_HIDDEN = "***"


def without_secrets(text: str) -> str:
    """Return the text with user names, passwords and queries of URLs replaced by ***.

    Example:
        >>> without_secrets("https://me:pw@host/a.tar?X-Amz-Signature=1 is not there")
        'https://***@host/a.tar?*** is not there'
    """
    return _QUERY.sub(rf"\1{_HIDDEN}", _PASSWORD.sub(rf"\1{_HIDDEN}@", text))


def printable(text: str) -> str:
    """Return the text without secrets, and with control characters escaped except line ends."""
    shown = without_secrets(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in shown)
