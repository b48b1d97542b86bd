"""What clients keep at sites, and what the hub remembers of it: which of their rounds it counted."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from lrbpfl import documents, trees
from lrbpfl.disk import make_durable, private_folder, writing
from lrbpfl.errors import BadInput
from lrbpfl.journal import Journal, Mark
from lrbpfl.states import NAME, read_state, state_file, write_state
from lrbpfl.trees import Tree


class Counted(NamedTuple):
    """Rounds done when an upload of a client was last counted; 0: never. The hub may go back to the earlier one."""

    now: int
    earlier: int


class Confirmed:
    """The hub's part: no states, only when each client's upload was last counted. It stands in a run for its states."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)
        self._counted: dict[int, list[int]] = {}
        self._staged: dict[int, int] = {}
        self._unsaved: dict[int, int] = {}

    def counted(self, k: int) -> Counted:
        """When client k's upload was last counted, now and in the checkpoint before."""
        rounds = self._counted.get(k) or [0]
        return Counted(now=rounds[-1], earlier=rounds[0])

    def start(self, rounds: int, mark: Mark | None = None) -> None:
        """Forget what was counted later."""
        self._journal.cut(mark)
        self._counted, self._staged, self._unsaved = {}, {}, {}
        for batch in self._journal.read():
            for k, counted in batch:
                if counted > rounds:
                    raise BadInput(f"{self._journal.path} counts an upload of round {counted}, later than {rounds}")
                self._counted.setdefault(k, [0]).append(counted)

    def get(self, k: int, fresh: Callable[[], Tree]) -> Tree:
        """Nothing that a client keeps is here; the hub's engine never asks, and who does has a mistake."""
        raise NotImplementedError("what clients keep is at their sites")

    def stage(self, k: int, rounds: int, state: Tree) -> None:
        """Client k's upload of this round is here."""
        self._staged[k] = rounds

    def accept(self, k: int) -> None:
        """It was counted."""
        rounds = self._staged.pop(k)
        self._counted.setdefault(k, [0]).append(rounds)
        self._unsaved[k] = rounds

    def save(self) -> Mark:
        """Write down what was counted since the last time."""
        if self._unsaved:
            self._journal.append([list(self._unsaved.items())])
        self._unsaved = {}
        return self._journal.mark

    def forget(self, oldest: int) -> None:
        """The earliest of a client's rounds is then the last one up to `oldest`."""
        for k, rounds in self._counted.items():
            before = [counted for counted in rounds if counted <= oldest]
            self._counted[k] = [*before[-1:], *(counted for counted in rounds if counted > oldest)]


class Generations:
    """A site's part: of each client a file for each round it may go back to, durable before the upload leaves.

    A file is pending until the hub, in its next letter, says which round of that client it counted; then any other is
    removed, but for the one that the hub may still go back to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counted: dict[int, int] = {}

    def settle(self, counted: Mapping[int, Counted]) -> None:
        """The hub's word on these clients."""
        for k, rounds in counted.items():
            self._counted[k] = rounds.now
            needed = {state_file(self.path, k, kept).name for kept in rounds}
            folder = state_file(self.path, k, 0).parent
            if not folder.is_dir():
                continue
            with writing(folder):
                for file in folder.iterdir():
                    if NAME.fullmatch(file.name.removeprefix(".").removesuffix(".part")) and file.name not in needed:
                        file.unlink()

    def get(self, k: int, fresh: Callable[[], Tree]) -> Tree:
        """What client k kept when it was last counted; refused if it is not here any more."""
        rounds, first = self._counted[k], fresh()
        if not rounds or not trees.leaves(first):
            return first
        path = state_file(self.path, k, rounds)
        return documents.tree(path, read_state(path, k, rounds), first, infinite=True)

    def stage(self, k: int, rounds: int, state: Tree) -> None:
        """Write it, unless it holds nothing: it outlives a power cut before the upload leaves."""
        if not trees.leaves(state):
            return
        file = state_file(self.path, k, rounds)
        private_folder(self.path)
        write_state(file, k, rounds, state)
        make_durable(file.parent)
        make_durable(self.path)

    def start(self, rounds: int, mark: Mark | None = None) -> None:
        """The hub says in each letter where its clients are."""

    def accept(self, k: int) -> None:
        """The hub says so with its next letter."""

    def save(self) -> Mark:
        """All is on the disk already."""
        return ""

    def forget(self, oldest: int) -> None:
        """The hub says in each letter what may go."""
