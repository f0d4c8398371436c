"""Text safe to print: names from a stranger's data may hold control characters, URLs secrets."""

import re

_URL = r"[A-Za-z0-9]:/+"  # `Path` drops a slash
_IN = r"(?:[^\s'\"]|['\"](?=\w))"  # a quote before a letter is part of the URL
_PASSWORD = re.compile(rf"({_URL})(?:(?:(?!/){_IN}){{1,2000}}|[^/\s:@'\"]*:{_IN}{{,2000}})@")
_QUERY = re.compile(rf"({_URL}(?:[^\s?]*|[^\n?]{{,2000}}(?=\?[\w.~%-]+=))\?){_IN}+")  # signatures
_PART = re.compile(rf"({_URL}[^\s?]*?[#;])[\w.~%-]+={_IN}*")  # tokens behind # or ;
_ENCODED = re.compile(rf"(%3A(?:%2F){{1,2}}){_IN}*?%40", re.IGNORECASE)  # a URL within a URL
_HIDDEN = "***"
# All control characters but line ends, marks of direction, separators of lines, and surrogates.
_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_secrets(text: str) -> str:
    """Return the text with user names, passwords and queries of URLs replaced by ***.

    Example:
        >>> without_secrets("https://me:pw@host/a.tar?X-Amz-Signature=1 is not there")
        'https://***@host/a.tar?*** is not there'
    """
    text = _ENCODED.sub(rf"\1{_HIDDEN}%40", _PASSWORD.sub(rf"\1{_HIDDEN}@", text))
    return _PART.sub(rf"\1{_HIDDEN}", _QUERY.sub(rf"\1{_HIDDEN}", text))


def printable(text: str) -> str:
    """Return the text without secrets, and with control characters escaped except line ends."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], without_secrets(text))
