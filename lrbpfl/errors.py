"""The one exception that means "the input is wrong, not the program"."""

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """Bad input, told in one sentence that names the offending value; the command line exits with code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or nothing if no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> BadInput:
    """The sentence about a name that does not exist."""
    known = list(known)
    return BadInput(f"unknown {what} {word!r}{nearest(word, known)}; known: {', '.join(known)}")
