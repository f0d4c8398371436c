"""Text safe to print: names in foreign data may hold control characters, URLs secrets."""

import re

_SCHEME_END = r"[A-Za-z0-9]:/+"  # `Path` drops a slash
_IN_URL = r"(?:[^\s'\"]|['\"](?=\w))"  # a quote before a letter is part of the URL
_PASSWORD = re.compile(
    # Bounded lengths, as backtracking is quadratic.
    rf"({_SCHEME_END})(?:(?:(?!/){_IN_URL}){{1,2000}}|[^/\s:@'\"]*:{_IN_URL}{{,2000}})@"
)
_QUERY = re.compile(  # holds signatures of S3
    rf"({_SCHEME_END}(?:[^\s?]*|[^\n?]{{,2000}}(?=\?[\w.~%-]+=))\?){_IN_URL}+"
)
_FRAGMENT = re.compile(rf"({_SCHEME_END}[^\s?]*?[#;])[\w.~%-]+={_IN_URL}*")  # tokens after # or ;
_NESTED_URL = re.compile(rf"(%3A(?:%2F){{1,2}}){_IN_URL}*?%40", re.IGNORECASE)  # percent-encoded
_HIDDEN = "***"
# Control characters except \n; also direction marks, line separators and surrogates.
_UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_secrets(text: str) -> str:
    """Return the text with URLs' user names, passwords, queries and key=value fragments as ***.

    Example:
        >>> without_secrets("https://me:pw@host/a.tar?X-Amz-Signature=1 is not there")
        'https://***@host/a.tar?*** is not there'
    """
    text = _NESTED_URL.sub(rf"\1{_HIDDEN}%40", _PASSWORD.sub(rf"\1{_HIDDEN}@", text))
    return _FRAGMENT.sub(rf"\1{_HIDDEN}", _QUERY.sub(rf"\1{_HIDDEN}", text))


def printable(text: str) -> str:
    """Return the text without secrets, with control characters except \\n escaped."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], without_secrets(text))
