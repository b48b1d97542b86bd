"""Any setting and any TOML file: it is taken, or refused in a sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrbpfl.experiments import runner
from lrbpfl.experiments.keys import find_keys
from tests.fuzz.conftest import check, fuzz

Place = Callable[[], Path]
FOUND = {key.name: key for key in find_keys(None)}
KEYS = sorted(FOUND)
NAMES = [
    "lr-bpfl",
    "lr-bpfl:paper",
    "fedavg",
    "fedbe",
    "per-fedavg",
    "pfedme",
    "pfedgp",
    "metavd",
    "pfedbayes",
    "local",
]
ODD = [
    "", "0", "-1", "1", "2", "0.5", "1e308", "-1e308", "1e-320", "nan", "inf", "true", "1_000", "0x" + "f" * 40,
    "9" * 30, "9" * 5000, "0x" + "f" * 5000, "[]", "[1, 2]", "[" * 2000, "[" * 200 + "]" * 200, "{}", "{a = 1}", "'x'",
    '"\\u0000"', "[/red]", "~nobody1/x", "/dev/null", "/proc/self/mem", "..", "x" * 5000, "a/" * 3000, "\x1b[31m",
    "\ud800", "2020-01-01", "1979-05-27T07:32:00Z", "none", "auto", "cosine", "client", "natural", "dirichlet", "size",
    "concept", "features", "pooled", "all", "resnet", "cnn", "validation", "serial", "meta", "cuda:99", "mps",
    "spawn", "digits",
]  # fmt: skip
values = st.one_of(st.sampled_from(ODD), st.text(max_size=20), st.integers().map(str), st.floats().map(str))
keys = st.one_of(
    st.sampled_from(KEYS), st.text(max_size=12), st.sampled_from(["data", "a.b.c", "algorithm.local.lr", "."])
)
SMALL = (
    "-s",
    "data.dataset=speakers",
    "-s",
    "federation.rounds=1",
    "-s",
    "federation.cohort=1",
    "-s",
    "engine.kind=serial",
)


@pytest.fixture(scope="module", autouse=True)
def nothing_trains() -> object:
    """Everything up to the first round is done; what a round makes of extreme numbers is told elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start", lambda config, path, setup, progress: {})
        patch.setattr("lrbpfl.cli.runs._tell", lambda summary, out: None)
        patch.setattr("lrbpfl.studies.comparison.start", lambda config, path, setup, progress: {})
        patch.setattr("lrbpfl.studies.tuning.search", lambda *args, **kwargs: [])
        yield


MOSTLY = st.sampled_from([True] * 7 + [False])


@st.composite
def settings_of(draw: st.DrawFn, name: str) -> list[str]:
    """Mostly keys that there are, with values that are mostly of the type they take, and small or at the edges."""
    method, given = name.partition(":")[0], []
    own = [key for key in KEYS if not key.startswith("algorithm.") or key.startswith(f"algorithm.{method}.")]
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(own) if draw(MOSTLY) else keys)
        value = draw(st.sampled_from(_likely(key)) if draw(MOSTLY) else values)
        given += ["-s", f"{key.replace(f'algorithm.{method}.', 'algorithm.')}={value}"]
    return given


def _likely(key: str) -> list[str]:
    found = FOUND.get(key)
    if found is None or isinstance(found.default, bool):
        return ["true", "false"]
    if "whole" in found.takes or type(found.default) is int:
        return ["0", "1", "2", "3", "7", "100", "65536", "10000000"]
    if "number" in found.takes or isinstance(found.default, float):
        return ["0.0", "1e-300", "1e-6", "0.1", "0.5", "0.9", "0.999999", "1", "3.5", "1e9"]
    words = [word.strip() for word in found.takes.split(",")]
    return words if len(words) > 1 else ["digits", "natural", "dirichlet", "labels", "size", "mlp"]


@fuzz(80)
@given(st.data(), st.sampled_from(NAMES))
def test_settings(place: Place, data: st.DataObject, name: str) -> None:
    check(place(), "run", "-q", "-a", name, *SMALL, *data.draw(settings_of(name)))


@fuzz(20)
@given(
    st.sampled_from(["compare", "tune", "partition", "keys"]),
    st.one_of(
        st.sampled_from(["", ",", "all", "local,", "local,local", "+", ":", "local+temper", "[/red]"]), st.text()
    ),
    st.lists(st.tuples(keys, values), max_size=2),
)
def test_other_commands(place: Place, command: str, name: str, chosen: list[tuple[str, str]]) -> None:
    given = [part for key, value in chosen for part in ("-s", f"{key}={value}")]
    if command == "keys":
        check(place(), command, "--", name)
    elif command == "partition":
        check(place(), command, *SMALL, *given)
    elif command == "tune":
        varied = [part for key, value in chosen for part in ("--vary", f"{key}={value}")]
        check(place(), command, "-q", f"--algorithm={name}", *SMALL, *varied)
    else:
        check(place(), command, "-q", f"--algorithms={name}", *SMALL, *given)


scalars = st.one_of(st.sampled_from([v for v in ODD if "\n" not in v]), st.just("'x'"), st.just("3"), st.just("[[1]]"))
lines = st.one_of(
    st.builds("{} = {}".format, st.sampled_from([k.rpartition(".")[2] for k in KEYS]), scalars),
    st.sampled_from(["[data]", "[federation]", "[algorithm]", "[engine]", "[[data]]", "[data.x]", "[compare]", "[a]"]),
    st.builds("{} = {}".format, st.sampled_from(["data", "federation", "algorithm", "engine", "versions"]), scalars),
    st.text(max_size=30),
)


@fuzz(40)
@given(
    st.one_of(
        st.lists(lines, max_size=6).map("\n".join).map(lambda t: t.encode(errors="replace")), st.binary(max_size=60)
    )
)
def test_toml(place: Place, data: bytes) -> None:
    folder = place()
    (folder / "c.toml").write_bytes(data)
    check(folder, "run", "-q", "-c", "c.toml", *SMALL[4:])


@fuzz(20)
@given(
    st.sampled_from(["run", "report", "card", "resume", "serve", "predict", "export", "onboard", "paper"]),
    st.one_of(st.sampled_from([v for v in ODD if v]), st.text(min_size=1, max_size=300)),
)
def test_paths(place: Place, command: str, path: str) -> None:
    path = path.replace("\0", "0")  # no command line holds one
    more: dict[str, tuple[str, ...]] = {
        "run": ("-q", *SMALL, f"--config={path}"),
        "report": ("--", path),
        "card": ("--", path),
        "resume": ("--", path),
        "serve": ("--port=0", "--", path),
        "predict": (f"--input={path}", "--", path),
        "export": (f"--to={path}.onnx", "--", path),
        "onboard": (f"--data={path}", f"--out={path}", "--", path),
        "paper": ("report", "rank-map", "--seeds=1", f"--runs={path}", f"--out={path}"),
    }
    check(place(), command, *more[command])
