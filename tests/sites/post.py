"""A transport within this process that keeps a copy of every letter, and loses those it is told to lose."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lrbpfl import trees
from lrbpfl.engines.serial import Serial
from lrbpfl.sites.site import Site
from lrbpfl.sites.transport import Letter, Lost, What

Loses = Callable[[What, str, Letter], str | None]  # "there", "back" or None, for each letter


def copied(letter: Any) -> Any:
    """A copy, as a network would make one."""
    if isinstance(letter, dict):
        return {key: copied(value) for key, value in letter.items()}
    if isinstance(letter, list):
        return [copied(value) for value in letter]
    return letter.clone() if isinstance(letter, torch.Tensor) else letter


class Post:
    """Carries letters to `Site`s that live in folders here."""

    def __init__(self, roots: Mapping[str, Path], job: Mapping[str, Any], loses: Loses = lambda *_: None) -> None:
        self.roots, self.loses = dict(roots), loses
        self.there = {name: Site(name, root, job, Serial) for name, root in roots.items()}
        self.sites = sorted(roots)
        self.letters: list[tuple[str, str, str, Letter]] = []  # what, site, "there" or "back", the letter

    def call(self, what: What, letters: Mapping[str, Letter], seconds: float) -> Iterator[tuple[str, Letter | Lost]]:
        answers = []
        for site, letter in letters.items():
            lost = self.loses(what, site, letter)
            self.letters.append((what, site, "there", copied(letter)))
            if lost == "there":
                answers.append((site, Lost("gone")))
                continue
            answer = copied(self.there[site].answer(what, copied(letter)))
            self.letters.append((what, site, "back", answer))
            answers.append((site, Lost("gone") if lost == "back" else answer))
        return iter(answers)

    def end(self) -> None:
        for site in self.there.values():
            site.end()


def leaves(letter: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a letter with its path, numbers in paths as #."""
    if isinstance(letter, dict):
        for key, value in letter.items():
            yield from leaves(value, f"{path}/{'#' if str(key).isdigit() else key}")
    else:
        yield path, letter


def same(a: Any, b: Any) -> bool:
    return trees.equal(a, b)
