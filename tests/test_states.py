"""What clients keep: staged, accepted, bounded in memory, and apart from what was undone. More in test_store.py."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lrbpfl import trees
from lrbpfl.states import Folder, Memory, States


def state(k: int, size: int = 4) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), float(k))}


def keep(states: States, k: int, rounds: int, value: int) -> None:
    states.stage(k, rounds, state(value))
    states.accept(k)


def value(states: States, k: int) -> float:
    return float(states.get(k, partial(state, -1))["w"][0])


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_state_counts_once_it_is_accepted(kind: str, tmp_path: Path) -> None:
    states: States = Memory() if kind == "memory" else Folder(tmp_path)
    states.start(0)
    states.stage(3, 1, state(30))
    assert value(states, 3) == -1.0
    states.accept(3)
    assert value(states, 3) == 30.0
    states.stage(3, 2, state(31))
    states.stage(3, 2, state(32))  # asked twice
    states.accept(3)
    assert value(states, 3) == 32.0
    states.start(1, states.save() if kind == "memory" else None)
    assert value(states, 3) == -1.0  # what was kept later than that is never seen again


def test_memory_is_bounded_and_the_least_recently_used_is_read_again(tmp_path: Path) -> None:
    states = Folder(tmp_path, cached=2 * trees.nbytes(state(0)))
    states.start(0)
    for k in range(3):
        keep(states, k, 1, k)
    assert list(states._cache) == [1, 2]
    assert value(states, 1) == 1.0 and value(states, 0) == 0.0
    assert list(states._cache) == [1, 0]
    assert states._used == 2 * trees.nbytes(state(0))


def test_between_two_saves_only_the_last_state_is_kept(tmp_path: Path) -> None:
    states = Folder(tmp_path)
    states.start(0)
    keep(states, 0, 1, 1)
    mark = states.save()
    states.forget(0)
    for rounds in (2, 3, 4):
        keep(states, 0, rounds, rounds)
    states.save()
    states.forget(1)
    assert sorted(file.name for file in (tmp_path / "00000").iterdir()) == [
        "state-000001.safetensors",
        "state-000004.safetensors",
    ]
    again = Folder(tmp_path)
    again.start(1, mark)
    assert value(again, 0) == 1.0


def test_clients_that_keep_nothing_leave_no_file(tmp_path: Path) -> None:
    states = Folder(tmp_path / "clients")
    states.start(0)
    states.stage(0, 1, None)
    states.accept(0)
    states.save()
    states.forget(0)
    assert not (tmp_path / "clients").exists()
