"""Run a configuration into a directory, and go on with one that was cut off."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from lrbpfl import trees
from lrbpfl.engines.loop import Observer, Round, federate
from lrbpfl.engines.work import Evaluated, Setup, fresh_state, granted
from lrbpfl.experiments.build import alphas_of_new, build, build_engine, cohort_of
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.store import Run, write_file
from lrbpfl.metrics import Predictions, scores, summarise, tempering
from lrbpfl.rng import generator

SCORES = (  # what summary.json holds of `summarise`
    "accuracy", "accuracy_mean", "accuracy_worst", "nll", "nll_worst", "brier", "ece_pooled", "ece_pooled_floor",
    "ece_pooled_debiased", "ece_pooled_low", "ece_pooled_high", "mce_pooled", "ece_mean", "ece_worst",
    "ece_worst_decile", "ece_floor_mean", "ece_floor_worst", "ece_debiased_mean", "total", "aleatoric", "epistemic",
    "clients", "examples",
)  # fmt: skip


class Progress(NamedTuple):
    """What a front end hears while a run goes on."""

    opened: Callable[[Run, Config], None] = lambda run, config: None  # its record holds the rounds done already
    client: Observer = lambda what, t, k, of: None
    round: Callable[[Round, Mapping[str, float]], None] = lambda round, pooled: None  # pooled scores, if judged


def start(config: Config, path: Path, setup: Setup, progress: Progress) -> dict[str, Any]:
    """A new run; its summary."""
    return _go(Run.create(path, config), config, setup, progress)


def resume(path: Path, progress: Progress, *, loading: bool = False) -> dict[str, Any]:
    """Go on with a run that was cut off, to the bits it would have had; a finished one only tells its summary."""
    run, config = Run.open(path)
    if (path / "summary.json").exists():
        progress.opened(run, config)
        return read_summary(path)
    return _go(run, config, build(config, progress=loading).setup, progress)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary


def read_client_names(path: Path) -> dict[int, str]:
    """The names of a run's clients, by their numbers; none if the run did not write them."""
    return _read_names(path / "clients.json")


def read_class_names(path: Path) -> dict[int, str]:
    """The names of a run's classes, by their numbers; none if the data did not name them."""
    return _read_names(path / "classes.json")


def _read_names(file: Path) -> dict[int, str]:
    return dict(enumerate(json.loads(file.read_text()))) if file.is_file() else {}


def _write_names(file: Path, names: Iterable[str]) -> None:
    write_file(file, (json.dumps(list(names)) + "\n").encode())


def _go(run: Run, config: Config, setup: Setup, progress: Progress) -> dict[str, Any]:
    setup = granted(setup)
    algorithm, task, _, seed, *_ = setup
    template = algorithm.init_server(task, generator(seed, "server"))
    checkpoint = run.load_checkpoint(config, template, {k: fresh_state(setup, k) for k in setup.training})
    alphas = alphas_of_new(config.data, len(setup.training))
    run.rewind(checkpoint)
    progress.opened(run, config)
    engine = build_engine(config, setup)
    if checkpoint:
        engine.states.update(checkpoint.states)
    try:
        for round in federate(
            engine,
            rounds=config.federation.rounds,
            cohort=cohort_of(config.federation, len(setup.training)),
            evaluate_every=config.federation.evaluate_every,
            start=(checkpoint.rounds, checkpoint.server) if checkpoint else None,
            observe=progress.client,
        ):
            temperatures = _temperatures(config.federation.temper, setup, round)
            round = _tempered(round, temperatures)
            pooled, pooled_new = _record(run, config, round, temperatures, alphas)
            if round.t + 1 == config.federation.rounds:
                _save_results(run, setup, round, alphas)
            run.save_checkpoint(config, round.t + 1, round.server, {k: engine.states[k] for k in round.accepted})
            progress.round(round, pooled)
    finally:
        engine.close()
    judged = {k: evaluation for k, evaluation in round.evaluations.items() if k in setup.training}
    return _summarise(run, config, setup, round._replace(evaluations=judged), pooled, pooled_new)


def _temperatures(how: str, setup: Setup, round: Round) -> dict[int, float]:
    """The temperature of everybody judged, fitted on calibration parts: its own, or those of all training clients.

    Who kept nothing from training has 1 of its own. Empty if nothing is to be tempered.
    """
    if how == "no":
        return {}
    kept = {k: [e.result.calibration] for k, e in round.evaluations.items() if e.result and e.result.calibration}
    if how == "client":
        return {k: tempering.fit(kept.get(k, [])) for k in round.evaluations}
    together = [part for k in setup.training for part in kept.get(k, [])]
    return dict.fromkeys(round.evaluations, tempering.fit(together))


def _tempered(round: Round, temperatures: Mapping[int, float]) -> Round:
    """The round with everybody's predictions at its temperature."""

    def at(k: int, result: Evaluated | None) -> Evaluated | None:
        return result and result._replace(predictions=tempering.temper(result.predictions, temperatures.get(k, 1.0)))

    return round._replace(evaluations={k: e._replace(result=at(k, e.result)) for k, e in round.evaluations.items()})


def _record(
    run: Run, config: Config, round: Round, temperatures: Mapping[int, float], alphas: Mapping[int, NewKind]
) -> tuple[dict[str, float], dict[NewKind, dict[str, float]]]:
    """Write a round into the record; the pooled scores of the training clients and of the new ones, if judged."""
    seed = config.federation.seed
    predictions = {k: e.result.predictions for k, e in round.evaluations.items() if e.result}
    per_client = {k: scores(p, seed=seed, path=(k,)) for k, p in predictions.items()}

    def pool(alpha: NewKind | None) -> dict[str, float]:
        some = [k for k in predictions if alphas.get(k) == alpha]
        return summarise({k: predictions[k] for k in some}, {k: per_client[k] for k in some}, seed=seed) if some else {}

    pooled = pool(None)
    told = {k: {**s, **({"temperature": temperatures[k]} if temperatures else {})} for k, s in per_client.items()}
    run.record(_lines(round, told, pooled, alphas))
    return pooled, {alpha: pool(alpha) for alpha in dict.fromkeys(alphas.values())}


def _lines(
    round: Round,
    per_client: Mapping[int, Mapping[str, float]],
    pooled: Mapping[str, float],
    alphas: Mapping[int, NewKind],
) -> Iterator[dict[str, Any]]:
    """One line per client and metric is the primary record; lines without a client are about the whole round.

    Lines about new clients say so, by their alpha, or "sites" for whole ones.
    """
    number = round.t + 1

    def about(k: int) -> dict[str, Any]:
        return {"round": number, "client": k, **({"new_alpha": alphas[k]} if k in alphas else {})}

    for k, reason in {**round.retried, **round.failures}.items():
        yield {"round": number, "client": k, "event": "skipped" if k in round.failures else "retried", "reason": reason}
    for k, evaluation in round.evaluations.items():
        if evaluation.failure:
            yield {**about(k), "event": "not judged", "reason": evaluation.failure}
    for table in (round.infos, per_client):
        for k, values in table.items():
            for metric, value in values.items():
                yield {**about(k), "metric": metric, "value": value}
    whole = {"bytes_down": round.bytes_down, "bytes_up": round.bytes_up, "seconds": round.seconds, **pooled}
    for metric, value in whole.items():
        yield {"round": number, "metric": metric, "value": value}


def _save_results(run: Run, setup: Setup, round: Round, alphas: Mapping[int, NewKind]) -> None:
    """Names, the last round's predictions, and every client's own model as far as it is its own."""
    _write_names(run.path / "clients.json", (client.name for client in setup.clients))
    if setup.task.class_names is not None:
        _write_names(run.path / "classes.json", setup.task.class_names)
    results = {k: e.result for k, e in round.evaluations.items() if e.result}
    if results:
        write_file(run.path / "predictions.safetensors", save(_stacked(results, alphas)))
    shared: dict[str, torch.Tensor] = {}
    for k, result in results.items():
        message = _message(setup, round, k)
        common = {name: sent for name, sent in result.shared.items() if _same(shared, sent, message[sent])}
        own = {name: message[sent] for name, sent in result.shared.items() if name not in common}
        run.save_personal(k, {**result.personal, **own}, common)
    write_file(run.path / "shared.safetensors", save(shared))


def _same(shared: dict[str, torch.Tensor], name: str, leaf: torch.Tensor) -> bool:
    """Whether this tensor of a message is the one all clients share under this name."""
    return shared.setdefault(name, leaf) is leaf


def _stacked(results: Mapping[int, Evaluated], alphas: Mapping[int, NewKind]) -> dict[str, torch.Tensor]:
    """Everybody's predictions as one table: client, label, mean probabilities, total and aleatoric uncertainty.

    Where there are new clients, a column more: their alpha, NaN for whole sites, and 0 for training clients.
    """

    def rows(field: Callable[[int, Predictions], Any]) -> torch.Tensor:
        return torch.cat([torch.as_tensor(field(k, result.predictions)) for k, result in results.items()])

    table = {
        "client": rows(lambda k, p: torch.full((len(p.y),), k)),
        "y": rows(lambda k, p: p.y),
        "probs": rows(lambda k, p: p.probs).float(),
        "total": rows(lambda k, p: p.total).float(),
        "aleatoric": rows(lambda k, p: p.aleatoric).float(),
    }
    if alphas:
        shown = {k: math.nan if kind == "sites" else kind for k, kind in alphas.items()}
        table["new_alpha"] = rows(lambda k, p: torch.full((len(p.y),), shown.get(k, 0.0), dtype=torch.float64))
    return table


def _summarise(
    run: Run,
    config: Config,
    setup: Setup,
    last: Round,
    pooled: Mapping[str, float],
    pooled_new: Mapping[NewKind, Mapping[str, float]],
) -> dict[str, Any]:
    """Write summary.json, the last thing a run does: {algorithm: scores and costs}, new clients apart, by alpha."""
    record = run.read_record()

    def total(metric: str) -> float:
        return sum(float(line["value"]) for line in record if line.get("metric") == metric and "client" not in line)

    def chosen(scores: Mapping[str, float]) -> dict[str, Any]:
        return {name: scores[name] for name in SCORES if name in scores}

    trained = sum(len(setup.clients[k].train.y) for k in setup.training)
    summary = {**chosen(pooled), "examples_train": trained}
    summary |= {name: total(name) for name in ("bytes_up", "bytes_down", "seconds")}
    summary |= _sizes(setup, last)
    summary |= _rank(record)
    summary["events"] = sum("event" in line for line in record)
    what = f"each client's own model after round {last.t + 1}, on its own {config.federation.evaluate_on} split"
    summary["evaluated"] = what
    summary["label_prior"] = config.federation.label_prior
    summary["temper"] = config.federation.temper
    if pooled_new:
        summary["new"] = {str(alpha): chosen(scores) for alpha, scores in pooled_new.items()}
    whole = {config.algorithm_name: summary}
    write_file(run.path / "summary.json", (json.dumps(whole, indent=2) + "\n").encode())
    return whole


def _rank(record: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over clients of the rank each had when it last took part; nothing for methods without ranks."""
    ranks = {line["client"]: line["value"] for line in record if line.get("metric") == "rank"}
    return {"rank": sum(ranks.values()) / len(ranks)} if ranks else {}


def _sizes(setup: Setup, last: Round) -> dict[str, int]:
    """Numbers in the server's state, and in the largest personal model, with what it took over from its message."""

    def size(k: int, result: Evaluated) -> int:
        sent = _message(setup, last, k)
        return trees.count(result.personal) + sum(sent[name].numel() for name in result.shared.values())

    sizes = [size(k, e.result) for k, e in last.evaluations.items() if e.result]
    return {"parameters": max(sizes, default=0), "parameters_server": trees.count(last.server)}


def _message(setup: Setup, round: Round, k: int) -> dict[str, torch.Tensor]:
    """What the server sends to client k after a round, by name."""
    return dict(trees.named_leaves(setup.algorithm.broadcast(setup.task, round.server, k)))
