"""The one exception that means "the input is wrong, not the program"."""

import difflib
import re
from collections.abc import Iterable

SENTENCE, VALUE = 1000, 80  # characters shown at most


def plain(text: object, limit: int = SENTENCE) -> str:
    """Anybody's text on one line, without characters that steer a terminal; of a long one, its beginning and its end.

    An exception is told by what it says or, if it says nothing, by its type.
    """
    try:
        said = str(text)
    except Exception:  # of somebody else's exception, or an integer of thousands of digits
        said = ""
    if len(said) > 4 * limit:  # what is dropped anyway need not be looked at
        said = f"{said[: 2 * limit]} ... {said[-2 * limit :]}"
    said = re.sub(r"\s*[^\S ]\s*", " ", said).strip()
    said = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in said)
    if len(said) > limit:
        end = (limit - 5) // 3
        said = f"{said[: limit - 5 - end]} ... {said[-end:]}"
    return said or type(text).__name__


def shown(value: object, limit: int = VALUE) -> str:
    """A value as a sentence quotes it: its repr, cut if it is long."""
    try:
        return plain(repr(value), limit)
    except Exception:  # Python writes no integer of more than some thousand digits
        return f"a value of type {type(value).__name__} that is too large to be shown"


class BadInput(ValueError):
    """Bad input, told in one sentence that names the offending value; the command line exits with code 2."""

    def __init__(self, sentence: object) -> None:
        super().__init__(plain(sentence))


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or nothing if no known word is near."""
    close = difflib.get_close_matches(word[:VALUE], list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> BadInput:
    """The sentence about a name that does not exist."""
    known = list(known)
    return BadInput(f"unknown {what} {shown(word)}{nearest(word, known)}; known: {', '.join(known)}")
