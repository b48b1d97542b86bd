"""Damaged files: clients' data, and everything in the directory of a finished run."""

import io
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lrbpfl
from lrbpfl.data import read_clients
from lrbpfl.errors import BadInput
from tests.fuzz.conftest import check, fuzz

Place = Callable[[], Path]
Damage = Callable[[bytes, random.Random], bytes]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 3, 20])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + rng.randbytes(rng.randrange(20)) + data[b:]


def _digits(data: bytes, rng: random.Random) -> bytes:
    """Another number, word or type in one place of a text."""
    places = [i for i, sign in enumerate(data) if chr(sign).isdigit()] or [0]
    new = rng.choice(
        [b"-", b"9" * 40, b"1e999", b"NaN", b"null", b'"x"', b"[]", b"{}", b"0", b"[" * 3000, b"true", b"e"]
    )
    i = rng.choice(places)
    return data[:i] + new + data[i + 1 :]


JUNK = [
    b"",
    b"\0" * 100,
    b"{damaged",
    b"[]",
    b"{}",
    b"null",
    b"3",
    b'"x"',
    b"[1]\n",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"a": 1}',
]
DAMAGES: dict[str, Damage] = {
    "cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "flip": _flipped,
    "splice": _spliced,
    "digits": _digits,
    "junk": lambda data, rng: rng.choice(JUNK),
    "twice": lambda data, rng: data + data,
}
damages = st.sampled_from(sorted(DAMAGES))
seeds = st.integers(0, 2**32)


def _npy(x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    made = io.BytesIO()
    np.save(made, x, allow_pickle=False)
    return made.getvalue()


X, Y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.arange(12) % 3
MEMBERS = {
    "floats": (_npy(X), _npy(Y)),
    "bytes": (_npy(np.arange(12 * 64, dtype=np.uint8).reshape(12, 8, 8)), _npy(Y.astype(str))),
    "wide": (_npy(X.astype(np.float64)), _npy(Y.astype(np.float16))),
    "times": (_npy(Y.astype("M8[s]")[:, None]), _npy(Y.astype("S1"))),
    "complex": (_npy(X.astype(np.complex64)), _npy(Y.astype(bool))),
    "fields": (_npy(np.zeros(12, dtype=[("a", "f4")])), _npy(Y.astype(">i2"))),
    "empty": (_npy(X[:0]), _npy(Y[:0])),
    "flat": (_npy(Y), _npy(X)),
}


@fuzz(120)
@given(
    st.sampled_from(sorted(MEMBERS)),
    st.sampled_from(["none", "inside", "inside", "outside"]),
    damages,
    seeds,
    st.booleans(),
)
def test_client_files(place: Place, kind: str, where: str, damage: str, seed: int, packed: bool) -> None:
    rng, folder = random.Random(seed), place()
    x, y = MEMBERS[kind]
    if where == "inside":  # of an archive whose checksums are right
        x, y = (DAMAGES[damage](x, rng), y) if rng.random() < 0.7 else (x, DAMAGES[damage](y, rng))
    with zipfile.ZipFile(folder / "b.npz", "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", y)
    if where == "outside":
        (folder / "b.npz").write_bytes(DAMAGES[damage]((folder / "b.npz").read_bytes(), rng))
    if rng.random() < 0.5:
        np.savez(folder / "a.npz", x=X, y=Y)
    try:
        read_clients(folder)
    except BadInput as error:
        assert len(str(error)) <= 1000
    if rng.random() < 0.2:
        check(folder, "partition", "--json", "-s", "data.dataset=.")


names = st.one_of(
    st.sampled_from(
        ["[/red]", "[bold]", "~", "..", "-", "a b", "a\tb", "\x1b[31m", "x" * 200, "\u202e", "9" * 5000, "NaN", ""]
    ),
    st.text(alphabet=st.characters(exclude_characters="\r\n"), max_size=20),
)


@fuzz(40)
@given(
    st.lists(names, min_size=1, max_size=3), st.lists(names, min_size=1, max_size=3), names, st.sampled_from([3, 99])
)
def test_names_in_tables(place: Place, clients: list[str], columns: list[str], odd: str, where: int) -> None:
    folder = place()
    rows = [["client", "label", *columns]]
    for client in clients:
        for i in range(6):
            rows.append([client, odd if i % 2 else "b", *(odd if i == where else str(i) for _ in columns)])
    text = "\n".join(",".join('"' + part.replace('"', '""') + '"' for part in row) for row in rows)
    (folder / "t.csv").write_text(text, errors="replace", encoding="utf-8")
    check(folder, "partition", "-s", "data.dataset=t.csv")


@pytest.fixture(scope="module")
def finished(place: Place) -> Path:
    """A comparison of two algorithms after one round, with sets and new clients."""
    folder = place()
    settings = (
        "federation.rounds=1", "federation.cohort=2", "engine.kind=serial", "federation.coverage=0.8",
        "data.calibration_fraction=0.4", "data.new_clients=2", "algorithm.lr-bpfl.mask_steps=1",
        "algorithm.lr-bpfl.calibration=0.0", "algorithm.lr-bpfl.predict_samples=2",
    )  # fmt: skip
    given = [part for setting in settings for part in ("-s", setting)]
    assert check(folder, "compare", "-q", "-a", "lr-bpfl,local", "-o", "run", *given).code == 0
    return folder / "run"


COMMANDS = ["report", "report one", "card", "card json", "load", "onboard", "predict", "export"]


@fuzz(30)
@given(st.sampled_from(COMMANDS), st.sampled_from([*sorted(DAMAGES), "delete", "folder"]), seeds)
def test_damaged_runs(place: Place, finished: Path, command: str, damage: str, seed: int) -> None:
    rng, folder = random.Random(seed), place()
    run = folder / "run"
    shutil.copytree(finished, run)
    one = run / "lr-bpfl"
    files = sorted(path for path in (one if command != "report" else run).rglob("*") if path.is_file())
    likely = [path for path in files if path.suffix in (".toml", ".json", ".jsonl") or path.name.startswith("pred")]
    file = rng.choice(likely if command.startswith("report") and rng.random() < 0.8 else files)
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "delete":
        file.write_bytes(DAMAGES[damage](data, rng))
    np.savez(folder / "in.npz", x=np.zeros((3, 10), np.float32), y=np.array(["hid", "hId", "hEd"]))
    if command == "load":
        try:
            lrbpfl.load(one, client="Andrew").predict(np.zeros((2, 10), np.float32))
        except BadInput as error:
            assert len(str(error)) <= 1000
        return
    arguments: dict[str, tuple[object, ...]] = {
        "report": ("report", run, "-o", folder / "page.html"),
        "report one": ("report", one, "-o", folder / "page.html"),
        "card": ("card", one, "--client", "Andrew"),
        "card json": ("card", one, "--client", "Andrew", "--json"),
        "onboard": ("onboard", one, "--data", folder / "in.npz", "-o", folder / "new.safetensors"),
        "predict": ("predict", one, "--client", "Andrew", "-i", folder / "in.npz"),
        "export": ("export", one, "--client", "Andrew", "--to", folder / "new.pt2"),
    }
    check(folder, *arguments[command])
    shutil.rmtree(folder)
