"""The front door: a model and everybody's data in, every client's own model out."""

import copy
import dataclasses
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lrbpfl import algorithms
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Algorithm, Task, wishes_of
from lrbpfl.cli.progress import Display
from lrbpfl.core.network import unmasked
from lrbpfl.core.precision import Precision
from lrbpfl.disk import write_file
from lrbpfl.engines.intake import Aggregate
from lrbpfl.engines.work import Setup, check_setup
from lrbpfl.errors import BadInput
from lrbpfl.experiments import promises, runner
from lrbpfl.experiments.build import cores, usable_device
from lrbpfl.experiments.config import OWN, Config, make_algorithm, parse
from lrbpfl.experiments.gather import gather
from lrbpfl.experiments.provenance import setup_digest
from lrbpfl.personal.model import PersonalModel, load
from lrbpfl.personal.onboarding import onboard
from lrbpfl.reports.collect import collect
from lrbpfl.reports.page import render

COHORT = 5  # clients a round, where nobody says how many
SHOWN = 5  # names in a sentence


class Federation:
    """Clients that learn together: `fit` trains, `personal` gives a client's own model, `onboard` a newcomer's.

    `clients` is a mapping from names to pairs (x, y), any other source that `lrbpfl.read_clients` takes, or
    `lrbpfl.LazyClients`, which are loaded when they are needed, as those of large folders are. `test` is one too, of
    the same clients; without it, `hold_out` of each client's examples are kept from training and judge its
    model. `calibration` of what is left is kept from training for good: what prediction sets are made of. `algorithm`
    is a name ("lr-bpfl", "fedavg-ft", "lr-bpfl:paper") or an object (`LRBPFL(max_rank=4)`).

    A model starts from fresh weights, or from its own if it is `pretrained`; its frozen parameters stay as they are.
    The model that was given is never changed.

    With `precision="bf16"` networks learn in bfloat16 and predict in float32. With `threads` above 1, clients learn one
    after the other with so many threads each. `engine` is "processes" otherwise; "ray" runs clients on a Ray cluster,
    one of this machine's own or that at the `address` (`workers`: its CPUs).
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Any,
        algorithm: str | Algorithm = "lr-bpfl",
        *,
        seed: int = 0,
        test: Any = None,
        hold_out: float = 0.3,
        calibration: float = 0.0,
        standardise: Literal["no", "client", "pooled"] = "no",
        pretrained: bool = False,
        label_prior: float | None = None,
        tokens: bool = False,
        client_column: str | None = None,
        label_column: str | None = None,
        workers: int | None = None,
        device: str = "cpu",
        start: Literal["auto", "fork", "forkserver", "spawn"] = "auto",
        precision: Precision = "float32",
        threads: int = 1,
        engine: str | None = None,
        address: str = "",
        quiet: bool = False,
    ) -> None:
        self.seed, self.quiet = seed, quiet
        self.algorithm = make_algorithm(algorithm, {}) if isinstance(algorithm, str) else algorithm
        self._name = algorithm if isinstance(algorithm, str) else name_of(algorithm)
        gathered = gather(
            clients, test, seed=seed, hold_out=hold_out, calibration=calibration, standardise=standardise,
            tokens=tokens, client=client_column, label=label_column,
            at_once=wishes_of(self.algorithm).public_fraction > 0,
        )  # fmt: skip
        self._model = copy.deepcopy(model).eval()
        task = Task(
            model=self._model,
            num_classes=len(gathered.classes),
            pretrained=pretrained,
            label_prior=label_prior,
            class_names=tuple(map(str, gathered.classes)),
        )
        self._setup = Setup(
            self.algorithm,
            task,
            gathered.clients,
            seed=seed,
            device=usable_device(device),
            classes=gathered.classes,
            features=gathered.features,
            precision=precision,
            threads=threads,
            data=gathered.digest,
        )
        _check(self._setup, tokens)
        self._engine = _engine(engine, workers, threads, address) | {"device": device, "start": start}
        self._data = {
            "dataset": f"{OWN}:{setup_digest(self._setup)}",
            "partition": "natural",
            "clients": len(gathered.clients),
            "calibration_fraction": float(calibration),
            "standardise": standardise,
        }
        self._config({})  # a seed, a prior or workers that cannot be show now
        self._path: Path | None = None
        self._temporary: tuple[Path, Callable[[], object]] | None = None
        self._say(*gathered.remarks, *_bare(self.algorithm, model))

    @property
    def clients(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._setup.names)

    def fit(
        self,
        rounds: int = 50,
        *,
        cohort: int | None = None,
        evaluate_every: int = 0,
        judged: int | None = None,
        judged_last: int | None = None,
        coverage: float | None = None,
        confidence: float | None = None,
        aggregate: Aggregate = "mean",
        clip: float | None = None,
        noise: float = 0.0,
        delta: float = 1e-5,
        directory: str | Path | None = None,
        any_version: bool = False,
    ) -> "Federation":
        """Train for so many rounds with `cohort` clients each, and make and judge every client's own model.

        With a `directory` everything is kept there: the same call goes on after a cut, and ends in the same bits; with
        `any_version` also where torch or this package has changed since. Where there are many clients, `judged` of them
        are judged every `evaluate_every` rounds, and `judged_last` at the end, who get models of their own; else all.
        `coverage` (and `confidence`) say what prediction sets promise when clients are judged. `aggregate` ("mean",
        "trimmed", "median"), `clip`, `noise` and `delta` say what the server makes of uploads (`lrbpfl keys`).
        """
        cohort = min(COHORT, len(self.clients)) if cohort is None else cohort
        federation: dict[str, Any] = {"rounds": rounds, "cohort": cohort, "evaluate_every": evaluate_every}
        federation |= {
            "judged": judged,
            "judged_last": judged_last,
            "aggregate": aggregate,
            "clip": clip,
            "noise": noise,
            "delta": delta,
        }
        config = self._config({**federation, "coverage": coverage, "confidence": confidence})
        promises.check_parts(coverage, confidence, config.data.calibration_fraction, self._setup.clients)
        path = Path(directory) if directory is not None else self._aside() / "run"
        with Display(quiet=self.quiet, silent=self.quiet) as display:
            progress = display.progress(self._name, config)
            runner.proceed(path, config, self._setup, progress, any_version=any_version)
        self._path = path
        return self

    def personal(self, client: str | int) -> PersonalModel:
        """A client's own model: it predicts, and can be saved."""
        return load(self.path, client=client, model=self._model)

    def onboard(self, x: Any, y: Any, *, name: str = "new", hold_out: float | None = None) -> PersonalModel:
        """The model of a client that took no part: it fits what is its own to what is shared; nothing is sent.

        A fifth of its examples, if there are ten or more, judge the model and make its sets.
        """
        return onboard(self.path, x, y, model=self._model, name=name, hold_out=hold_out, seed=self.seed)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Every client's scores on its test data, by its name."""
        (result,) = collect([self.path])
        return {client["name"]: client["scores"] for client in result.clients}

    def report(self, path: str | Path) -> Path:
        """Write one HTML page about all clients; it needs no network and no other file."""
        page = render(collect([self.path])).encode()
        try:
            write_file(Path(path), page)
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from None
        return Path(path)

    @property
    def path(self) -> Path:
        """The directory of the finished run; without one of your own, a temporary one that ends with this object."""
        if self._path is None:
            raise BadInput("this federation has not been trained yet, or was closed: call fit first")
        return self._path

    def close(self) -> None:
        """Let temporary files go; worker processes have ended with `fit`."""
        if self._temporary is not None:
            folder, clear = self._temporary
            clear()
            self._temporary = None
            self._path = None if self._path == folder / "run" else self._path

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        trained = "not trained yet" if self._path is None else f"trained, in {self._path}"
        return f"<Federation of {len(self.clients)} clients by {self._name}, {trained}>"

    def _config(self, federation: dict[str, Any]) -> Config:
        """What makes this run, in the form that every run's directory keeps."""
        asked = self._setup.task.label_prior
        prior = wishes_of(self.algorithm).label_prior if asked is None else asked
        common = {"seed": self.seed, "model": OWN, "label_prior": float(prior)}
        common |= {"precision": self._setup.precision, "threads": self._setup.threads}
        given = {key: value for key, value in federation.items() if value is not None}
        return parse(
            {
                "data": self._data,
                "federation": {**common, **given},
                "engine": self._engine,
                "algorithm": {**dataclasses.asdict(self.algorithm), "name": self._name},
            }
        )

    def _aside(self) -> Path:
        """A directory that lives as long as this object."""
        self.close()
        folder = tempfile.TemporaryDirectory(prefix="lrbpfl-")
        self._temporary = Path(folder.name), weakref.finalize(self, folder.cleanup)
        return Path(folder.name)

    def _say(self, *sentences: str) -> None:
        for sentence in () if self.quiet else sentences:
            print(f"lrbpfl: {sentence}", file=sys.stderr)


def name_of(algorithm: Algorithm) -> str:
    """The name under which an algorithm can be found again, here or by an entry point."""
    if isinstance(algorithm, type) or not dataclasses.is_dataclass(algorithm):
        raise BadInput(f"algorithm is {algorithm!r}: give a name, as 'lr-bpfl', or an object, as LRBPFL(max_rank=4)")
    for name in algorithms.names():
        if type(algorithm) is algorithms.find(name):
            return name
    raise BadInput(
        f"{type(algorithm).__name__} has no name under which a saved model could find it again: "
        "offer it as an entry point of the group lrbpfl.algorithms"
    )


def _engine(kind: str | None, workers: int | None, threads: int, address: str) -> dict[str, Any]:
    """Workers, here or on a cluster, or one client after the other with several threads each."""
    if threads > 1 and workers not in (None, 1):
        raise BadInput(f"workers is {workers} and threads is {threads}: several of both would share the same cores")
    many = (0 if address else cores()) if workers is None else workers
    return {"kind": kind or ("serial" if threads > 1 else "processes"), "workers": many, "address": address}


def _check(setup: Setup, tokens: bool) -> None:
    try:
        check_setup(setup)
    except BadInput as error:
        looked_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in setup.task.model.modules())
        if tokens or not looked_up:
            raise
        raise BadInput(f"{error} (whole numbers stay so, to be looked up, with tokens=True)") from error


def _bare(algorithm: Algorithm, model: nn.Module) -> list[str]:
    """What is worth saying of weights that carry no mask, where the algorithm puts masks on a model."""
    bare = unmasked(model, algorithm.mask_layers) if isinstance(algorithm, LRBPFL) else []
    some = ", ".join(bare[:SHOWN]) + (", ..." if len(bare) > SHOWN else "")
    return [f"no masks on {some}: these weights are the same for all clients"] if bare else []
