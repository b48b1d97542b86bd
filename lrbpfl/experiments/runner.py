"""Run a configuration into a directory, and go on with one that was cut off."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl import trees
from lrbpfl.core.precision import native_bf16
from lrbpfl.disk import locked, write_file
from lrbpfl.engines import privacy
from lrbpfl.engines.loop import Engine, Evaluation, Observer, Round, federate
from lrbpfl.engines.work import Setup, granted
from lrbpfl.errors import BadInput
from lrbpfl.experiments import provenance
from lrbpfl.experiments.build import alphas_of_new, build, build_engine, cohort_of
from lrbpfl.experiments.config import Config, intake_of
from lrbpfl.experiments.judging import Judge, Verdict
from lrbpfl.experiments.promises import NO_PROMISE, SETS
from lrbpfl.experiments.store import Run, claimed, fingerprint, read_origin, refuse_existing
from lrbpfl.rng import generator
from lrbpfl.trees import Tree

SCORES = (  # what summary.json holds of `summarise`, and of sets
    "accuracy", "accuracy_mean", "accuracy_worst", "nll", "nll_worst", "brier", "ece_pooled", "ece_pooled_floor",
    "ece_pooled_debiased", "ece_pooled_low", "ece_pooled_high", "mce_pooled", "ece_mean", "ece_worst",
    "ece_worst_decile", "ece_floor_mean", "ece_floor_worst", "ece_debiased_mean", "total", "aleatoric", "epistemic",
    "clients", "examples", *SETS,
)  # fmt: skip

SLOW_BF16 = "this CPU does not multiply in bfloat16 itself: learning in it may take longer here than in float32"

NOBODY = Verdict(pooled={}, pooled_new={})


class Progress(NamedTuple):
    """What a front end hears while a run goes on."""

    opened: Callable[[Run, Config], None] = lambda run, config: None  # its record holds the rounds done already
    client: Observer = lambda what, t, k, of: None
    round: Callable[[Round, Mapping[str, float]], None] = lambda ended, pooled: None  # pooled scores, if judged
    tell: Callable[[str], None] = lambda sentence: None  # what is worth knowing, and stops nothing


def start(config: Config, path: Path, setup: Setup, progress: Progress) -> dict[str, Any]:
    """A new run; its summary."""
    refuse_existing(path)
    _privacy(config, granted(setup), config.federation.rounds)  # too little noise shows before anything is written
    with claimed(path):
        return _go(Run(path), config, setup, progress, new=True)


def resume(path: Path, progress: Progress, *, loading: bool = False, any_version: bool = False) -> dict[str, Any]:
    """Go on with a run that was cut off, to the bits it would have had; a finished one only tells its summary."""
    run, config = Run.open(path)
    if (path / "summary.json").exists():
        progress.opened(run, config)
        return read_summary(path)
    with locked(path):
        setup = build(config, progress=loading).setup
        check_origin(path, setup, progress, any_version=any_version)
        return _go(run, config, setup, progress)


def proceed(
    path: Path, config: Config, setup: Setup, progress: Progress, *, any_version: bool = False
) -> dict[str, Any]:
    """A run of data that no configuration can load: a new one, or on with what is there if that is the same run."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return start(config, path, setup, progress)
    run, found = Run.open(path)
    if fingerprint(found) != fingerprint(config):
        raise BadInput(
            f"{path} holds another run: its data, model, starting weights, fields, rounds or seed "
            "differ; name another directory"
        )
    if (path / "summary.json").exists():
        return read_summary(path)
    with locked(path):
        check_origin(path, setup, progress, any_version=any_version)
        return _go(run, config, setup, progress)


def made_with(setup: Setup) -> dict[str, str]:
    """What, beside versions, may change a number and is in no configuration: the data's content, and the device."""
    return {"device": setup.device, **({"data": setup.data} if setup.data else {})}


def check_origin(path: Path, setup: Setup, progress: Progress, *, any_version: bool) -> None:
    """Tell, or refuse, what the run was made with and is not here."""
    now = {**provenance.versions(), **made_with(setup)}
    if told := provenance.check_provenance(path, read_origin(path), now, any_version=any_version):
        progress.tell(told)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict) or not all(isinstance(scores, dict) for scores in summary.values()):
        raise BadInput(f"{file} is damaged: it holds no scores by algorithm; without it, resume judges the run again")
    return summary


def _go(run: Run, config: Config, setup: Setup, progress: Progress, *, new: bool = False) -> dict[str, Any]:
    """Train and judge; nothing is written of a new run for which there is no engine."""
    setup = granted(setup)
    if config.federation.precision == "bf16" and setup.device == "cpu" and not native_bf16():
        progress.tell(SLOW_BF16)
    with closing(build_engine(config, setup, run.states)) as engine:
        if new:
            run.begin(config, made_with(setup))
        return carry_out(engine, run, config, setup, progress)


def carry_out(
    engine: Engine,
    run: Run,
    config: Config,
    setup: Setup,
    progress: Progress,
    *,
    showing: Callable[[int, Tree], None] = lambda t, server: None,
) -> dict[str, Any]:
    """The rounds that are still to be done, recorded and saved; the summary.

    `showing` hears the round and the server's state before clients are judged by it.
    """
    asked = config.federation
    template = setup.algorithm.init_server(setup.task, generator(setup.seed, "server"))
    checkpoint = run.load(config, template, progress.tell)
    alphas = alphas_of_new(config.data, len(setup.training))
    progress.opened(run, config)
    judges: dict[int, Judge] = {}  # at most one at a time, by its round

    def judging(t: int, server: Tree) -> Callable[[Evaluation], None]:
        showing(t, server)
        judges[t] = Judge(run, config, setup, alphas, t, partial(setup.algorithm.broadcast, setup.task, server))
        return judges[t].take

    verdict = NOBODY
    try:
        for ended in federate(
            engine,
            rounds=asked.rounds,
            cohort=cohort_of(asked, len(setup.training)),
            evaluate_every=asked.evaluate_every,
            judged=asked.judged,
            judged_last=asked.judged_last,
            intake=intake_of(asked),
            start=(checkpoint.rounds, checkpoint.server) if checkpoint else None,
            observe=progress.client,
            judging=judging,
        ):
            verdict = judges[ended.t].finish() if judges else NOBODY
            judges.clear()
            spent = _privacy(config, setup, ended.t + 1) if verdict is not NOBODY else {}
            run.record.append(_lines(ended, {**verdict.pooled, **spent}))
            if ended.t + 1 == asked.rounds or (ended.t + 1) % config.engine.checkpoint_every == 0:
                run.save(config, ended.t + 1, ended.server)
            progress.round(ended, verdict.pooled)
    finally:
        for judge in judges.values():
            judge.drop()
    return summarise(run, config, setup, trees.count(ended.server), verdict)


def _privacy(config: Config, setup: Setup, rounds: int) -> dict[str, float]:
    """Epsilon and delta after so many rounds; nothing where there is no noise."""
    if not config.federation.noise:
        return {}
    clients = len(setup.training)
    cohort = cohort_of(config.federation, clients)
    spent = privacy.epsilon(intake_of(config.federation), clients, cohort, rounds)
    return {"epsilon": spent, "delta": config.federation.delta}


def _lines(ended: Round, pooled: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """One line per client and metric is the primary record; lines without a client are about the whole round."""
    number = ended.t + 1
    for k, reason in {**ended.retried, **ended.failures}.items():
        yield {"round": number, "client": k, "event": "skipped" if k in ended.failures else "retried", "reason": reason}
    if ended.undone:
        yield {"round": number, "event": "undone", "reason": ended.undone}
    for k, values in ended.infos.items():
        for metric, value in values.items():
            yield {"round": number, "client": k, "metric": metric, "value": value}
    whole = {"bytes_down": ended.bytes_down, "bytes_up": ended.bytes_up, "seconds": ended.seconds, **pooled}
    for metric, value in whole.items():
        yield {"round": number, "metric": metric, "value": value}


def summarise(run: Run, config: Config, setup: Setup, size: int, verdict: Verdict) -> dict[str, Any]:
    """Write summary.json, the last thing a run does: {algorithm: scores and costs}, new clients apart, by alpha."""

    def chosen(scores: Mapping[str, float]) -> dict[str, Any]:
        return {name: scores[name] for name in SCORES if name in scores}

    totals = _totals(run.record.read())
    summary: dict[str, Any] = {**chosen(verdict.pooled), "examples_train": verdict.examples_train, **totals}
    summary["clients_train"] = len(setup.training)
    summary |= {"parameters": verdict.parameters, "parameters_server": size}
    summary |= _privacy(config, setup, config.federation.rounds)
    asked = config.federation
    what = f"each client's own model after round {asked.rounds}, on its own {asked.evaluate_on} split"
    summary["evaluated"] = what
    summary["label_prior"] = config.federation.label_prior
    summary["temper"] = config.federation.temper
    if config.federation.coverage is not None:
        summary |= {"coverage_promised": config.federation.coverage, "confidence": config.federation.confidence}
    if verdict.pooled_new:
        summary["new"] = {str(alpha): chosen(scores) for alpha, scores in verdict.pooled_new.items()}
    whole = {config.algorithm_name: summary}
    write_file(run.path / "summary.json", (json.dumps(whole, indent=2) + "\n").encode())
    return whole


def _totals(record: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of all rounds: bytes and seconds, how often something went wrong, and the mean over clients of the rank each had
    when it last took part (nothing for methods without ranks).
    """
    sums: dict[str, float] = {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0}
    events, ranks = 0, dict[int, float]()
    for line in record:
        metric = line.get("metric")
        if metric in sums and "client" not in line:
            sums[metric] += float(line["value"])
        elif metric == "rank":
            ranks[line["client"]] = line["value"]
        events += line.get("event", NO_PROMISE) != NO_PROMISE
    rank = {"rank": sum(ranks.values()) / len(ranks)} if ranks else {}
    return {**sums, **rank, "events": events}
