"""Letters between hub and sites: how messages are packed into them, and the checks of whoever opens one."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.sites.stores import Counted
from lrbpfl.sites.transport import Letter
from lrbpfl.trees import Tree

MOST = 10**7  # of anything that is counted
MOST_NUMBERS = 64  # that come with an upload
LONGEST = 200  # letters of a name
# What a site may say instead of an answer, and how the hub puts it.
REASONS = {
    "changed": "its data or its versions are not those it joined with",
    "classes": "its data have a class that the job does not name",
    "clients": "its clients are not those it joined with",
    "columns": "its data have other columns, or inputs of another shape or kind, than the job names",
    "data": "its data cannot be read or used",
    "failed": "something went wrong there",
    "job": "it cannot use the job: another version, or a fault in its description",
    "letter": "it was sent a letter that is not in order",
    "replay": "it was sent an old letter, or one again",
    "settings": "its site.toml is missing or has a fault",
    "state": "what its client kept is not there any more",
    "steps": "the job asks for more steps of training than it allows",
    "store": "its store cannot be written, or another process uses it",
    "training": "its client's training or evaluation failed",
}


class Refused(Exception):
    """A letter that is not answered, by a code of `REASONS`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def reason(answer: Mapping[str, Any]) -> str | None:
    """Why there is no answer, in our words and with the type of what was raised; None: there is one."""
    if "error" not in answer:
        return None
    kind = answer.get("type")
    known = kind if isinstance(kind, str) and kind.isidentifier() and len(kind) <= 60 else "error"
    return f"{REASONS.get(str(answer['error']), 'it gave no reason')} ({known})"


def pack(messages: Mapping[int, Tree]) -> Letter:
    """Messages as named tensors, those that all have in common only once."""
    named = {k: dict(trees.named_leaves(message)) for k, message in messages.items()}
    first = next(iter(named.values()))
    common = {name: leaf for name, leaf in first.items() if all(other.get(name) is leaf for other in named.values())}
    own = {
        str(k): {name: _flat(leaf) for name, leaf in tensors.items() if name not in common}
        for k, tensors in named.items()
    }
    return {"common": {name: _flat(leaf) for name, leaf in common.items()}, "own": own}


def unpack(letter: Letter, templates: Mapping[int, Tree]) -> dict[int, Tree]:
    """The messages of a letter, each of its template's form."""
    common, own = tensors(letter.get("common")), letter.get("own")
    if not isinstance(own, dict) or own.keys() != {str(k) for k in templates}:
        raise Refused("letter")
    return {k: fitted({**common, **tensors(own[str(k)])}, template) for k, template in templates.items()}


def fitted(named: dict[str, Tensor], template: Tree) -> Tree:
    """The tree of these tensors, if they are the template's in names, shapes and dtypes, and finite."""
    if named.keys() != dict(trees.named_leaves(template)).keys():
        raise Refused("letter")
    tree = trees.rebuild(template, named)
    if trees.fault(tree, template):
        raise Refused("letter")
    return tree


def tensors(given: Any) -> dict[str, Tensor]:
    """Named tensors, dense and on the CPU."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise Refused("letter")
    for leaf in given.values():
        if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device.type != "cpu" or leaf.is_quantized:
            raise Refused("letter")
    return {name: leaf.detach().contiguous() for name, leaf in given.items()}


def whole(letter: Mapping[str, Any], key: str, *, least: int = 0, most: int = MOST) -> int:
    """A whole number of a letter."""
    value = letter.get(key)
    if type(value) is not int or not least <= value <= most:
        raise Refused("letter")
    return value


def numbers(given: Any) -> dict[str, float]:
    """Named finite numbers, not too many."""
    fits = isinstance(given, dict) and len(given) <= MOST_NUMBERS and all(map(is_name, given))
    if not fits or not all(type(value) in (int, float) and math.isfinite(value) for value in given.values()):
        raise Refused("letter")
    return {name: float(value) for name, value in given.items()}


def is_name(name: Any) -> bool:
    """Whether this can name a client, or a number."""
    return isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable() and name == name.strip()


def table(given: Any) -> dict[str, Any]:
    """A letter's part that holds further ones."""
    if not isinstance(given, dict):
        raise Refused("letter")
    return given


def counted(letter: Letter, ids: set[int]) -> dict[int, Counted]:
    """Which rounds of these clients, all of them the receiver's, the hub counted."""
    found: dict[int, Counted] = {}
    for k, said in table(letter.get("counted")).items():
        if not isinstance(k, str) or not k.isascii() or not k.isdigit() or int(k) not in ids:
            raise Refused("letter")
        rounds = table(said)
        now = whole(rounds, "now")
        found[int(k)] = Counted(now=now, earlier=whole(rounds, "earlier", most=now))
    if not found:
        raise Refused("letter")
    return dict(sorted(found.items()))


def _flat(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().contiguous()
