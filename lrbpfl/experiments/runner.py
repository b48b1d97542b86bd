"""Run a configuration into a directory, and go on with one that was cut off."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl import trees
from lrbpfl.disk import write_file
from lrbpfl.engines import privacy
from lrbpfl.engines.loop import Observer, Round, federate
from lrbpfl.engines.work import Evaluated, Setup, fresh_state, granted
from lrbpfl.errors import BadInput
from lrbpfl.experiments import promises
from lrbpfl.experiments.build import alphas_of_new, build, build_engine, cohort_of
from lrbpfl.experiments.config import Config, intake_of
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.promises import NO_PROMISE, SETS, Promises
from lrbpfl.experiments.results import message_of, save_results
from lrbpfl.experiments.store import Run, fingerprint
from lrbpfl.metrics import scores, summarise, tempering
from lrbpfl.rng import generator

SCORES = (  # what summary.json holds of `summarise`, and of sets
    "accuracy", "accuracy_mean", "accuracy_worst", "nll", "nll_worst", "brier", "ece_pooled", "ece_pooled_floor",
    "ece_pooled_debiased", "ece_pooled_low", "ece_pooled_high", "mce_pooled", "ece_mean", "ece_worst",
    "ece_worst_decile", "ece_floor_mean", "ece_floor_worst", "ece_debiased_mean", "total", "aleatoric", "epistemic",
    "clients", "examples", *SETS,
)  # fmt: skip


class Progress(NamedTuple):
    """What a front end hears while a run goes on."""

    opened: Callable[[Run, Config], None] = lambda run, config: None  # its record holds the rounds done already
    client: Observer = lambda what, t, k, of: None
    round: Callable[[Round, Mapping[str, float]], None] = lambda round, pooled: None  # pooled scores, if judged


def start(config: Config, path: Path, setup: Setup, progress: Progress) -> dict[str, Any]:
    """A new run; its summary."""
    _privacy(config, granted(setup), config.federation.rounds)  # too little noise shows before anything is written
    return _go(Run.create(path, config), config, setup, progress)


def resume(path: Path, progress: Progress, *, loading: bool = False) -> dict[str, Any]:
    """Go on with a run that was cut off, to the bits it would have had; a finished one only tells its summary."""
    run, config = Run.open(path)
    if (path / "summary.json").exists():
        progress.opened(run, config)
        return read_summary(path)
    return _go(run, config, build(config, progress=loading).setup, progress)


def proceed(path: Path, config: Config, setup: Setup, progress: Progress) -> dict[str, Any]:
    """A run of data that no configuration can load: a new one, or on with what is there if that is the same run."""
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()  # somebody made room
    if not path.exists():
        return start(config, path, setup, progress)
    run, found = Run.open(path)
    if fingerprint(found) != fingerprint(config):
        raise BadInput(
            f"{path} holds another run: its data, model, starting weights, fields, rounds or seed "
            "differ; name another directory"
        )
    return read_summary(path) if (path / "summary.json").exists() else _go(run, config, setup, progress)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary


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
            intake=intake_of(config.federation),
            start=(checkpoint.rounds, checkpoint.server) if checkpoint else None,
            observe=progress.client,
        ):
            temperatures = _temperatures(config.federation.temper, setup, round)
            round = _tempered(round, temperatures)
            promised = promises.fit(config.federation.coverage, config.federation.confidence, round)
            per_client, pooled, pooled_new = _record(run, config, round, temperatures, promised, alphas)
            if round.evaluations and (told := _privacy(config, setup, round.t + 1)):
                run.record([{"round": round.t + 1, "metric": "epsilon", "value": told["epsilon"]}])
            if round.t + 1 == config.federation.rounds:
                save_results(run, config, setup, round, per_client, temperatures, alphas)
            run.save_checkpoint(config, round.t + 1, round.server, {k: engine.states[k] for k in round.accepted})
            progress.round(round, pooled)
    finally:
        engine.close()
    judged = {k: evaluation for k, evaluation in round.evaluations.items() if k in setup.training}
    return _summarise(run, config, setup, round._replace(evaluations=judged), pooled, pooled_new)


def _privacy(config: Config, setup: Setup, rounds: int) -> dict[str, float]:
    """Epsilon and delta after so many rounds; nothing where there is no noise."""
    if not config.federation.noise:
        return {}
    clients = len(setup.training)
    cohort = cohort_of(config.federation, clients)
    spent = privacy.epsilon(intake_of(config.federation), clients, cohort, rounds)
    return {"epsilon": spent, "delta": config.federation.delta}


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
    run: Run,
    config: Config,
    round: Round,
    temperatures: Mapping[int, float],
    promised: Promises,
    alphas: Mapping[int, NewKind],
) -> tuple[dict[int, dict[str, float]], dict[str, float], dict[NewKind, dict[str, float]]]:
    """Write a round into the record; scores of each client judged, and pooled over training and over new ones."""
    seed = config.federation.seed
    predictions = {k: e.result.predictions for k, e in round.evaluations.items() if e.result}
    per_client = {k: scores(p, seed=seed, path=(k,)) for k, p in predictions.items()}

    def pool(alpha: NewKind | None) -> dict[str, float]:
        some = {k: per_client[k] for k in predictions if alphas.get(k) == alpha}
        whole = summarise({k: predictions[k] for k in some}, some, seed=seed) if some else {}
        return whole | promised.pooled(some)

    pooled = pool(None)
    heat = {k: {"temperature": temperature} for k, temperature in temperatures.items()}
    told = {k: {**s, **heat.get(k, {}), **promised.scores.get(k, {})} for k, s in per_client.items()}
    refused = promised.refused if round.t + 1 == config.federation.rounds else {}  # the same in every round
    run.record(_lines(round, told, refused, pooled, alphas))
    return told, pooled, {alpha: pool(alpha) for alpha in dict.fromkeys(alphas.values())}


def _lines(
    round: Round,
    per_client: Mapping[int, Mapping[str, float]],
    refused: Mapping[int, str],
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
    if round.undone:
        yield {"round": number, "event": "undone", "reason": round.undone}
    for k, evaluation in round.evaluations.items():
        if evaluation.failure:
            yield {**about(k), "event": "not judged", "reason": evaluation.failure}
    for k, reason in refused.items():
        yield {**about(k), "event": NO_PROMISE, "reason": reason}
    for table in (round.infos, per_client):
        for k, values in table.items():
            for metric, value in values.items():
                yield {**about(k), "metric": metric, "value": value}
    whole = {"bytes_down": round.bytes_down, "bytes_up": round.bytes_up, "seconds": round.seconds, **pooled}
    for metric, value in whole.items():
        yield {"round": number, "metric": metric, "value": value}


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
    summary |= _privacy(config, setup, config.federation.rounds)
    summary["events"] = sum(line.get("event", NO_PROMISE) != NO_PROMISE for line in record)
    what = f"each client's own model after round {last.t + 1}, on its own {config.federation.evaluate_on} split"
    summary["evaluated"] = what
    summary["label_prior"] = config.federation.label_prior
    summary["temper"] = config.federation.temper
    if config.federation.coverage is not None:
        summary |= {"coverage_promised": config.federation.coverage, "confidence": config.federation.confidence}
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
        sent = message_of(setup, last, k)
        return trees.count(result.personal) + sum(sent[name].numel() for name in result.shared.values())

    sizes = [size(k, e.result) for k, e in last.evaluations.items() if e.result]
    return {"parameters": max(sizes, default=0), "parameters_server": trees.count(last.server)}
