"""What clients keep between rounds, wherever it is kept.

A client that has trained stages its new state; it counts once the server has counted the upload that came with it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lrbpfl import documents, trees
from lrbpfl.disk import make_durable, private_folder, writing
from lrbpfl.documents import FORMAT, Document
from lrbpfl.errors import BadInput
from lrbpfl.journal import Journal, Mark
from lrbpfl.trees import Tree

CACHED = 256 * 2**20  # bytes of states that a folder's store keeps in memory
NAME = re.compile(r"state-(\d+)\.safetensors")


class States(Protocol):
    """Of every client, what it kept when it last took part. Rounds are counted from 1 here: those done."""

    def start(self, rounds: int, mark: Mark | None = None) -> None:
        """Training begins after so many rounds: what was kept in later ones is never seen again.

        With the mark of that moment, refused if what was kept by then is not there any more.
        """

    def get(self, k: int, fresh: Callable[[], Tree]) -> Tree:
        """What client k keeps; `fresh()`, which has the form that all its states have, if it never took part."""

    def stage(self, k: int, rounds: int, state: Tree) -> None:
        """What client k would keep after this round; it is forgotten unless it is accepted in this round."""

    def accept(self, k: int) -> None:
        """The server counted client k's upload: what was staged is what it keeps."""

    def save(self) -> Mark:
        """All that was accepted outlives a power cut from now on; a mark of this moment."""

    def forget(self, oldest: int) -> None:
        """Nobody will start from fewer than `oldest` rounds again: what only that would need may go."""


class Memory:
    """States that end with this process."""

    def __init__(self) -> None:
        self.kept: dict[int, Tree] = {}
        self._rounds: dict[int, int] = {}
        self._staged: dict[int, tuple[int, Tree]] = {}

    def start(self, rounds: int, mark: Mark | None = None) -> None:
        """Forget who took part later."""
        self._staged.clear()
        for k in [k for k, kept in self._rounds.items() if kept > rounds]:
            del self.kept[k], self._rounds[k]

    def get(self, k: int, fresh: Callable[[], Tree]) -> Tree:
        """The state, as it was given."""
        return self.kept[k] if k in self.kept else fresh()

    def stage(self, k: int, rounds: int, state: Tree) -> None:
        """Keep it aside."""
        self._staged = {**_of_round(self._staged, rounds), k: (rounds, state)}

    def accept(self, k: int) -> None:
        """Keep it."""
        self._rounds[k], self.kept[k] = self._staged.pop(k)

    def save(self) -> Mark:
        """Nothing outlives the process."""
        return ""

    def forget(self, oldest: int) -> None:
        """Only the newest are there."""


class Folder:
    """States in a directory: a folder for each client that took part, in it a file for each round it may go back to.

    A file holds a checksum and whose it is, and is for its owner's eyes alone. A journal says who kept something when:
    what it does not name is never read. The least recently used states are read from the disk again.
    """

    def __init__(self, path: Path, cached: int = CACHED) -> None:
        self.path, self._limit, self._used = path, cached, 0
        self._journal = Journal(path / "states.jsonl", private=True)
        self._generations: dict[int, list[int]] = {}  # rounds after which a client's files were written, rising
        self._cache: OrderedDict[int, Tree] = OrderedDict()
        self._staged: dict[int, tuple[int, Tree]] = {}
        self._unsaved: dict[int, int] = {}  # the rounds of what was accepted since the last save
        self._touched: set[int] = set()  # whose files were written since somebody last tidied up

    def start(self, rounds: int, mark: Mark | None = None) -> None:
        """Read from the journal who kept what by then; what was saved last is checked at once."""
        self._journal.cut(mark)
        self._generations, self._cache, self._used = {}, OrderedDict(), 0
        self._staged, self._unsaved, self._touched = {}, {}, set()
        batch: list[tuple[int, int]] = []
        for batch in self._journal.read():
            for k, kept in batch:
                if kept > rounds:
                    raise BadInput(f"{self._journal.path} names a state of round {kept}, later than {rounds}")
                self._generations.setdefault(k, []).append(kept)
        for k, kept in batch:
            self._document(k, kept)
            self._touched.add(k)  # whoever wrote them may have died before tidying up

    def get(self, k: int, fresh: Callable[[], Tree]) -> Tree:
        """The state in memory or in its file, checked; refused by the file's name if it is not what was written."""
        if k in self._cache:
            self._cache.move_to_end(k)
            return self._cache[k]
        if k not in self._generations:
            return fresh()
        state = self._read(k, self._generations[k][-1], fresh())
        self._remember(k, state)
        return state

    def stage(self, k: int, rounds: int, state: Tree) -> None:
        """Keep it aside, in memory."""
        self._staged = {**_of_round(self._staged, rounds), k: (rounds, state)}

    def accept(self, k: int) -> None:
        """Write it, unless it holds nothing."""
        rounds, state = self._staged.pop(k)
        if not trees.leaves(state):
            return
        private_folder(self.path)
        write_state(self._file(k, rounds), k, rounds, state, durable=False)
        generations = self._generations.setdefault(k, [])
        if k in self._unsaved:  # nobody can go back to a moment between two saves
            generations.remove(self._unsaved[k])
        generations.append(rounds)
        self._unsaved[k] = rounds
        self._touched.add(k)
        self._remember(k, state)

    def save(self) -> Mark:
        """Make the files durable, and then what the journal says of them."""
        for k, rounds in self._unsaved.items():
            make_durable(self._file(k, rounds))
            make_durable(self._folder(k))
        if self._unsaved:
            make_durable(self.path)
            self._journal.append([list(self._unsaved.items())])
        self._unsaved = {}
        return self._journal.mark

    def forget(self, oldest: int) -> None:
        """Of those who kept something since the last time, remove what nobody can go back to, and what nobody names."""
        for k in self._touched:
            old = [rounds for rounds in self._generations[k] if rounds <= oldest]
            self._generations[k] = [*old[-1:], *(rounds for rounds in self._generations[k] if rounds > oldest)]
            needed = {self._file(k, rounds).name for rounds in self._generations[k]}
            with writing(self._folder(k)):
                for file in self._folder(k).iterdir():
                    if NAME.fullmatch(file.name.removeprefix(".").removesuffix(".part")) and file.name not in needed:
                        file.unlink()
        self._touched = set()

    def _read(self, k: int, rounds: int, like: Tree) -> Tree:
        return documents.tree(self._file(k, rounds), self._document(k, rounds), like, infinite=True)

    def _document(self, k: int, rounds: int) -> Document:
        return read_state(self._file(k, rounds), k, rounds)

    def _remember(self, k: int, state: Tree) -> None:
        if k in self._cache:
            self._used -= trees.nbytes(self._cache.pop(k))
        self._cache[k] = state
        self._used += trees.nbytes(state)
        while self._used > self._limit:
            _, gone = self._cache.popitem(last=False)
            self._used -= trees.nbytes(gone)

    def _folder(self, k: int) -> Path:
        return state_file(self.path, k, 0).parent

    def _file(self, k: int, rounds: int) -> Path:
        return state_file(self.path, k, rounds)


def state_file(clients: Path, k: int, rounds: int) -> Path:
    """Where client k's state after so many rounds lies."""
    return clients / f"{k:05d}" / f"state-{rounds:06d}.safetensors"


def write_state(path: Path, k: int, rounds: int, state: Tree, *, durable: bool = True) -> None:
    """A state, with a checksum and whose it is."""
    about = {"format": FORMAT, "kind": "state", "client": k, "rounds": rounds}
    documents.write(path, Document(about, dict(trees.named_leaves(state))), durable=durable)


def read_state(path: Path, k: int, rounds: int) -> Document:
    """What was written, refused by the file's name if it is another's."""
    document = documents.read(path, "state")
    if (document.about.get("client"), document.about.get("rounds")) != (k, rounds):
        raise BadInput(f"{path} holds another client's or another round's state")
    return document


def _of_round(staged: dict[int, tuple[int, Tree]], rounds: int) -> dict[int, tuple[int, Tree]]:
    """What was staged in this round; nobody will accept anything of an earlier one."""
    return {k: kept for k, kept in staged.items() if kept[0] == rounds}
