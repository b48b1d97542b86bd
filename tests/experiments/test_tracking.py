"""Trackers show what the record holds, every round once, and never stand in a run's way."""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lrbpfl.engines.loop import Round
from lrbpfl.experiments import tracking
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.store import Run
from lrbpfl.experiments.tracking import PACKAGES, TRACKERS, follow
from tests.experiments.conftest import Configure, contents, run
from tests.experiments.reaper import Cut
from tests.experiments.test_resume import cut_after

# MLflow reads its database in a way that SQLAlchemy 2.1 advises against.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

needs_tensorboard = pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed")
needs_mlflow = pytest.mark.skipif(not all(map(find_spec, PACKAGES["mlflow"])), reason="mlflow or its store is missing")
Points = dict[tuple[str, int], float]  # (name of a curve, ended) -> value


class Place(NamedTuple):
    """A tracker, and how its side of a run is read back."""

    kind: str
    curves: Callable[[Path], Points]
    config: Callable[[Path], dict[str, dict[str, Any]]]
    rel: float  # precision of its numbers


def once(points: Iterator[tuple[tuple[str, int], float]]) -> Points:
    found = list(points)
    assert [name for name, times in Counter(name for name, _ in found).items() if times > 1] == []
    return dict(found)


def accumulated(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(path / "tensorboard")).Reload()


def tensorboard_curves(path: Path) -> Points:
    events = accumulated(path)
    return once(((tag, e.step), e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag))


def tensorboard_config(path: Path) -> dict[str, dict[str, Any]]:
    (event,) = accumulated(path).Tensors("config")
    text = event.tensor_proto.string_val[0].decode()
    return tomllib.loads(text.removeprefix("```\n").removesuffix("```"))


def the_run(path: Path) -> tuple[Any, Any]:
    """MLflow's client and the only run of this test's experiment."""
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == json.loads((path / "mlflow.json").read_text())["run_id"]
    return client, found


def mlflow_curves(path: Path) -> Points:
    client, found = the_run(path)
    histories = ((name, client.get_metric_history(found.info.run_id, name)) for name in found.data.metrics)
    return once(((name, point.step), point.value) for name, history in histories for point in history)


def mlflow_config(path: Path) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for name, text in the_run(path)[1].data.params.items():
        section, _, key = name.partition(".")
        try:
            tables.setdefault(section, {})[key] = json.loads(text)
        except ValueError:
            tables.setdefault(section, {})[key] = text
    return tables


TENSORBOARD = Place("tensorboard", tensorboard_curves, tensorboard_config, rel=1e-6)
MLFLOW = Place("mlflow", mlflow_curves, mlflow_config, rel=0.0)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests, because MLflow takes seconds to make one."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(autouse=True)
def experiment(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own in MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)


@pytest.fixture(
    params=[
        pytest.param(TENSORBOARD, id="tensorboard", marks=needs_tensorboard),
        pytest.param(MLFLOW, id="mlflow", marks=needs_mlflow),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


def silent(text: str) -> None:
    raise AssertionError(text)


def recorded(path: Path) -> Points:
    """What a tracker should show, from the lines of metrics.jsonl."""
    points: Points = {}
    losses: dict[int, list[float]] = {}
    ranks: dict[int, list[float]] = {}
    for line in (json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines()):
        t = line["round"]
        if "client" in line and line.get("metric") in ("loss", "rank"):
            (losses if line["metric"] == "loss" else ranks).setdefault(t, []).append(line["value"])
        elif "client" not in line:
            group = "costs" if line["metric"] in ("bytes_down", "bytes_up", "seconds") else "scores"
            points[f"{group}/{line['metric']}", t] = line["value"]
    for name, table in (("loss", losses), ("rank", ranks)):
        points |= {(f"cohort/{name}", t): sum(values) / len(values) for t, values in table.items()}
    return points


def assert_shown(place: Place, path: Path, *, but: tuple[str, int] | None = None) -> None:
    """The tracker shows the record, nothing else, and every point once."""
    expected, found = recorded(path), place.curves(path)
    assert found.keys() == expected.keys()
    for name in expected.keys() - {but}:
        assert found[name] == pytest.approx(expected[name], rel=place.rel or 1e-15), name


def begin(config: Config, path: Path, progress: Progress) -> None:
    start(config, path, build_setup(config), progress)


@pytest.mark.parametrize("engine", [{"kind": "serial"}, {"kind": "processes", "workers": 2}], ids=["serial", "two"])
def test_the_curves_are_those_of_the_record(
    place: Place, engine: dict[str, Any], configure: Configure, tmp_path: Path
) -> None:
    steps = {"mask_steps": 2, "model_steps": 2, "predict_samples": 2}
    config = configure(
        data={"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5, 5.0]},
        federation={"rounds": 5},
        algorithm={"name": "lr-bpfl", **steps},
        engine=engine,
    )
    begin(config, tmp_path / "run", follow(place.kind, Progress(), silent))
    shown = place.curves(tmp_path / "run")
    assert {t for name, t in shown if name == "scores/accuracy"} == {2, 4, 5}
    assert {t for name, t in shown if name == "cohort/rank"} == {1, 2, 3, 4, 5}
    assert_shown(place, tmp_path / "run")


def test_the_configuration_goes_with_them(place: Place, configure: Configure, tmp_path: Path) -> None:
    config = configure(federation={"rounds": 1})
    begin(config, tmp_path / "run", follow(place.kind, Progress(), silent))
    assert place.config(tmp_path / "run") == json.loads(json.dumps(config.tables()))


def test_a_tracked_run_has_the_bits_of_any_other(place: Place, configure: Configure, tmp_path: Path) -> None:
    run(configure(), tmp_path / "plain")
    begin(configure(), tmp_path / "run", follow(place.kind, Progress(), silent))
    own = {name: data for name, data in contents(tmp_path / "run").items() if place.kind not in name}
    assert own == contents(tmp_path / "plain")


def test_a_resumed_run_goes_on_where_its_tracker_was(place: Place, configure: Configure, tmp_path: Path) -> None:
    """Cut before the tracker hears of a round and after it, and after the last round, which is then done again."""
    path = tmp_path / "run"

    def heard(t: int) -> Progress:
        """A cut after the tracker has heard of round t."""
        tracked = follow(place.kind, Progress(), silent)

        def stop(ended: Round, pooled: Mapping[str, float]) -> None:
            tracked.round(ended, pooled)
            cut_after(t).round(ended, pooled)

        return tracked._replace(round=stop)

    with pytest.raises(Cut):
        begin(configure(), path, heard(0))
    with pytest.raises(Cut):
        resume(path, follow(place.kind, cut_after(1), silent))
    assert max(t for _, t in place.curves(path)) == 1
    with pytest.raises(Cut):
        resume(path, heard(3))
    assert_shown(place, path)
    resume(path, follow(place.kind, Progress(), silent))
    assert_shown(place, path, but=("costs/seconds", 4))  # the only number that differs when a round is done again
    assert place.config(path) == json.loads(json.dumps(configure().tables()))


def test_a_round_that_was_recorded_in_vain_is_not_shown(
    place: Place, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between its record and its checkpoint: it is done again, and takes another number of seconds."""
    save, path = Run.save, tmp_path / "run"

    def cut(self: Run, config: Config, rounds: int, *state: Any) -> None:
        if rounds == 3:
            raise Cut
        save(self, config, rounds, *state)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Run, "save", cut)
        begin(configure(), path, follow(place.kind, Progress(), silent))
    assert Run(path).read_record()[-1]["round"] == 3
    resume(path, follow(place.kind, Progress(), silent))
    assert_shown(place, path)


def test_a_run_that_was_not_tracked_can_be_shown_later(place: Place, configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Cut):
        begin(configure(), path, cut_after(2))
    resume(path, Progress())
    for _ in range(2):
        resume(path, follow(place.kind, Progress(), silent))
        assert_shown(place, path)


def test_a_tracker_that_fails_does_not_stop_the_run(
    place: Place, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker: Any = TRACKERS[place.kind]
    write = tracker.write
    told: list[str] = []

    def fail(self: Any, number: int, curves: Mapping[str, float]) -> None:
        if number > 1:
            raise OSError("no space\nleft on device")
        write(self, number, curves)

    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(tracker, "write", fail)
        begin(configure(), path, follow(place.kind, Progress(), told.append))
    assert told == [f"{place.kind} fails, the run goes on without it: OSError: no space left on device"]
    assert (path / "summary.json").exists()
    assert {t for _, t in place.curves(path)} == {1}
    resume(path, follow(place.kind, Progress(), silent))
    assert_shown(place, path)


def test_a_number_that_is_not_finite_is_left_out() -> None:
    lines = [
        {"round": 1, "client": 0, "metric": "loss", "value": None},
        {"round": 1, "client": 1, "metric": "loss", "value": 2.0},
        {"round": 1, "client": 2, "event": "skipped", "reason": "upload refused"},
        {"round": 1, "metric": "nll", "value": None},
        {"round": 1, "metric": "seconds", "value": 3.0},
        {"round": 2, "client": 0, "metric": "loss", "value": None},
    ]
    assert list(tracking.by_round(lines)) == [(1, {"costs/seconds": 3.0, "cohort/loss": 2.0}), (2, {})]


@needs_tensorboard
def test_an_event_that_was_cut_off_is_written_again(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Cut):
        begin(configure(), path, follow("tensorboard", cut_after(2), silent))
    (file,) = (path / "tensorboard").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert max(t for _, t in tensorboard_curves(path)) == 1
    resume(path, follow("tensorboard", Progress(), silent))
    assert_shown(TENSORBOARD, path)


@needs_mlflow
def test_mlflow_tells_running_runs_from_finished_ones(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "lr-bpfl-digits"
    with pytest.raises(Cut):
        begin(configure(), path, follow("mlflow", cut_after(1), silent))
    _, found = the_run(path)
    assert (found.info.run_name, found.info.status) == ("lr-bpfl-digits", "RUNNING")
    resume(path, follow("mlflow", Progress(), silent))
    _, found = the_run(path)
    assert found.info.status == "FINISHED"
    resume(path, follow("mlflow", Progress(), silent))
    assert the_run(path)[1].info.end_time == found.info.end_time


@needs_mlflow
def test_a_store_that_cannot_be_opened_is_told_once(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://somewhere")
    told: list[str] = []
    begin(configure(), tmp_path / "run", follow("mlflow", Progress(), told.append))
    assert len(told) == 1 and told[0].startswith("mlflow fails, the run goes on without it: ")
    assert (tmp_path / "run" / "summary.json").exists()
    assert Run(tmp_path / "run").read_record()[-1]["round"] == 4


@needs_mlflow
def test_a_run_begins_anew_where_mlflow_does_not_know_it(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with pytest.raises(Cut):
        begin(configure(), path, follow("mlflow", cut_after(2), silent))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"{tmp_path.name}-other")
    resume(path, follow("mlflow", Progress(), silent))
    assert_shown(MLFLOW, path)
