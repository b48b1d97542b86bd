"""A run's curves for TensorBoard or MLflow, taken from its record while it goes on.

What goes out is the configuration, and of metrics.jsonl the lines about whole rounds and the cohort's mean loss and
rank: no data, no model, no line about a single client. TensorBoard's files lie in the run's directory; MLflow writes to
a local database unless MLFLOW_TRACKING_URI says otherwise, and tells nobody that it is used.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from lrbpfl.disk import write_file
from lrbpfl.engines.loop import Round
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import Config, to_toml, unknown
from lrbpfl.experiments.runner import Progress
from lrbpfl.experiments.store import Run

COSTS = ("bytes_down", "bytes_up", "seconds")
OF_COHORT = ("loss", "rank")  # what clients tell of their training, as a mean over the cohort
EXPERIMENT = "lrbpfl"  # in MLflow, unless MLFLOW_EXPERIMENT_NAME says otherwise
MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # a server that is gone holds the run up for seconds, not for minutes
}

Curves = Mapping[str, float]


class Tracker(Protocol):
    """One run in a place that shows curves."""

    last: int  # the last round that is there already; 0: none

    def write(self, number: int, curves: Curves) -> None:
        """The values of one round, all or none of them."""

    def finish(self) -> None:
        """The last round is written."""


class TensorBoard:
    """Event files in RUN/tensorboard, one for each time the run is started; values are kept as 32-bit numbers."""

    def __init__(self, run: Run, config: Config) -> None:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        self.config = f"```\n{to_toml(config.tables())}```"
        folder = run.path / "tensorboard"
        before = folder.glob("events.out.tfevents.*")
        self.last = max((event.step for file in before for event in EventFileLoader(str(file)).Load()), default=0)
        self.file = folder / f"events.out.tfevents.{time.time():.6f}"  # read in the order of their names

    def write(self, number: int, curves: Curves) -> None:
        """One event with all values: what is cut off within an event does not count."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self.file.exists():
            self._begin()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in curves.items()]
        self._append(step=number, summary=Summary(value=values))

    def finish(self) -> None:
        """Nothing is left to do."""

    def _begin(self) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self.file.parent.mkdir(exist_ok=True)
        self._append(file_version="brain.Event:2")
        if self.last == 0:
            self._append(step=0, summary=text_pb("config", self.config))

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self.file.open("ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **fields).SerializeToString())


class MLflow:
    """A run in MLflow's store, named like the run's directory, where mlflow.json keeps its id."""

    def __init__(self, run: Run, config: Config) -> None:
        for name, value in MLFLOW_SETTINGS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Param

        self.client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)).experiment_id
        note = run.path / "mlflow.json"
        known = self._find(experiment, note)
        if known is None:
            known = self.client.create_run(experiment, run_name=run.path.resolve().name).info.run_id
            write_file(note, (json.dumps({"run_id": known}) + "\n").encode())
            params = [Param(name, value) for name, value in _flat(config.tables())]
            self.client.log_batch(known, params=params)
        self.run_id = known
        self.last = max((metric.step for metric in self.client.get_metric_history(known, "costs/seconds")), default=0)

    def write(self, number: int, curves: Curves) -> None:
        """One batch with all values."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run_id, metrics=[Metric(name, value, now, number) for name, value in curves.items()])

    def finish(self) -> None:
        """Until here MLflow shows the run as going on."""
        if self.client.get_run(self.run_id).info.status == "RUNNING":
            self.client.set_terminated(self.run_id)

    def _find(self, experiment: str, note: Path) -> str | None:
        """The id of this run, if it was tracked in this store before."""
        if not note.is_file():
            return None
        run_id = str(json.loads(note.read_text())["run_id"])
        found = self.client.search_runs([experiment], filter_string=f"attributes.run_id = '{run_id}'")
        return run_id if found else None


TRACKERS: dict[str, Callable[[Run, Config], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


def check_tracker(kind: str | None) -> None:
    """Refuse a tracker that is unknown, or whose packages are missing; None is no tracker."""
    if kind is None:
        return
    if kind not in TRACKERS:
        raise unknown("tracker", kind, TRACKERS)
    missing = [package for package in PACKAGES[kind] if not find_spec(package)]
    if missing:
        raise BadInput(f"--track {kind} needs {', '.join(missing)}: install it with pip install 'lrbpfl[track]'")


def follow(kind: str, progress: Progress, tell: Callable[[str], None]) -> Progress:
    """The same progress, with a tracker that follows the run."""
    follower = _Follower(TRACKERS[kind], lambda error: tell(f"{kind} fails, the run goes on without it: {error}"))

    def both(ended: Round, pooled: Mapping[str, float]) -> None:
        progress.round(ended, pooled)
        follower.catch_up()

    return progress._replace(opened=follower.open, round=both)


class _Follower:
    """Hands the record on, round by round, until the tracker fails; what it missed comes when the run is resumed."""

    def __init__(self, make: Callable[[Run, Config], Tracker], tell: Callable[[str], None]) -> None:
        self.make, self.tell = make, tell
        self.tracker: Tracker | None = None

    def open(self, run: Run, config: Config) -> None:
        """The tracker's side of this run, with all that the record holds already."""
        self.metrics, self.rounds, self.read = run.metrics, config.federation.rounds, 0
        try:
            self.tracker = self.make(run, config)
        except Exception as error:  # whatever goes wrong in somebody else's store, the run matters more
            self._give_up(error)
        self.catch_up()

    def catch_up(self) -> None:
        """Hand on what was recorded since the last time."""
        if self.tracker is None or not self.metrics.exists():
            return
        with self.metrics.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        self.read += len(new)
        try:
            for number, curves in by_round(map(json.loads, new.splitlines())):
                if number > self.tracker.last:
                    self.tracker.write(number, curves)
                if number == self.rounds:
                    self.tracker.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.tracker = None
        self.tell(f"{type(error).__name__}: {' '.join(str(error).split())}")


def by_round(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """The curves of each round in some lines of a record, which holds rounds one after the other."""
    for number, group in groupby(lines, key=lambda line: int(line["round"])):
        known = [line for line in group if line.get("value") is not None]
        whole = {line["metric"]: float(line["value"]) for line in known if "client" not in line}
        curves = {f"{'costs' if name in COSTS else 'scores'}/{name}": value for name, value in whole.items()}
        for name in OF_COHORT:
            if values := [float(line["value"]) for line in known if "client" in line and line["metric"] == name]:
                curves[f"cohort/{name}"] = statistics.fmean(values)
        yield number, curves


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """`section.key` and value of a configuration, as text."""
    for section, table in tables.items():
        for key, value in table.items():
            yield f"{section}.{key}", value if isinstance(value, str) else json.dumps(value)
