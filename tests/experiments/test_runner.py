"""A run writes what it promises."""

import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Generator, Tensor

from lrbpfl import documents, trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs, length
from lrbpfl.core.network import Params
from lrbpfl.engines.work import evaluate_client
from lrbpfl.experiments import runner
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.results import read_class_names, read_client_names
from lrbpfl.experiments.runner import Progress, read_summary, resume, start
from lrbpfl.experiments.store import Run
from lrbpfl.journal import Journal
from lrbpfl.personal.model import load
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.experiments.conftest import NAMES, Configure, files, run

SCORES = {"accuracy", "nll", "brier", "ece_pooled", "mce_pooled", "ece_mean", "ece_worst", "ece_floor_mean"}
SCORES |= {"ece_debiased_mean", "bytes_up", "bytes_down", "parameters", "seconds"}


def test_a_run_leaves_its_files_and_nothing_else(finished: Path) -> None:
    names = {str(file) for file in files(finished)}
    assert {f"clients/{k:05d}/personal.safetensors" for k in range(4)} <= names
    rest = {name for name in names if not name.startswith(("clients/", "checkpoint/", "W-"))}
    texts = {"config.toml", "metrics.jsonl", "summary.json", "clients.json"}
    assert rest == texts | {"predictions.safetensors"}
    assert len(list(finished.glob("W-*.safetensors"))) == 1
    assert read_client_names(finished) == dict(enumerate(NAMES))
    assert not [name for name in names if ".part" in name or "/." in name or name.startswith(".")]


def test_the_summary_has_its_keys_under_the_name_of_the_algorithm(finished: Path) -> None:
    _, config = Run.open(finished)
    summary = read_summary(finished)
    assert list(summary) == [config.algorithm_name]
    scores = summary[config.algorithm_name]
    assert set(scores) >= SCORES
    assert all(0 <= scores[name] <= 1 for name in SCORES if name.startswith(("acc", "ece", "mce")))
    assert scores["clients"] == 4 and scores["events"] == 0
    at_server = 2 if config.algorithm_name == "fedbe" else 0
    assert (scores["examples_train"], scores["examples"]) == (52 - at_server, 52)
    assert scores["evaluated"] == "each client's own model after round 4, on its own test split"


def test_the_accuracy_is_that_of_the_stored_predictions(finished: Path) -> None:
    (scores,) = read_summary(finished).values()
    table = load_file(finished / "predictions.safetensors")
    assert table["probs"].shape == (52, 3)
    assert torch.allclose(table["probs"].sum(1), torch.ones(52))
    correct = (table["probs"].argmax(1) == table["y"]).double()
    assert scores["accuracy"] == pytest.approx(correct.mean().item(), abs=1e-12)
    each = [correct[table["client"] == k].mean().item() for k in range(4)]
    assert scores["accuracy_worst"] == pytest.approx(min(each), abs=1e-12)
    picked = table["probs"][torch.arange(52), table["y"]].double()
    assert scores["nll"] == pytest.approx(-picked.log().mean().item(), rel=1e-5)


def test_bytes_are_those_of_the_cohorts_messages(finished: Path) -> None:
    (scores,) = read_summary(finished).values()
    _, config = Run.open(finished)
    setup = build_setup(config)
    server = last_server(finished, setup.algorithm.init_server(setup.task, Generator()))
    message = setup.algorithm.broadcast(setup.task, server, 0)
    assert scores["bytes_down"] == 4 * 2 * trees.nbytes(message)  # four rounds of two clients
    assert scores["bytes_up"] == scores["bytes_down"]
    assert scores["parameters_server"] == trees.count(server)


def test_parameters_are_those_of_the_largest_personal_model(finished: Path) -> None:
    (scores,) = read_summary(finished).values()
    _, config = Run.open(finished)
    setup = build_setup(config)
    algorithm, task, clients, seed = setup.algorithm, setup.task, setup.clients, setup.seed
    server = last_server(finished, algorithm.init_server(task, Generator()))
    sizes = []
    for k, client in enumerate(clients):
        message, state = algorithm.broadcast(task, server, k), algorithm.init_client(task, generator(seed, "client", k))
        sizes.append(trees.count(algorithm.personalise(task, message, state, client.train, Generator())))
    assert scores["parameters"] == max(sizes)


def last_server(path: Path, template: Tree) -> Tree:
    return trees.rebuild(template, load_file(path / "checkpoint" / "000004" / "server.safetensors"))


def personal_tensors(path: Path, k: int) -> dict[str, Tensor]:
    """Client k's own model as the files tell it."""
    (shared,) = (load_file(file) for file in path.glob("W-*.safetensors"))
    about, own = documents.read(path / "clients" / f"{k:05d}" / "personal.safetensors", "personal")
    leaves = about["leaves"].items()
    return {name: own[f"own/{name}"] if there is None else shared[f"message/{there}"] for name, there in leaves}


def test_the_personal_files_predict_what_the_run_predicted(finished: Path) -> None:
    _, config = Run.open(finished)
    setup = build_setup(config)
    algorithm, task, clients = setup.algorithm, setup.task, setup.clients
    table = load_file(finished / "predictions.safetensors")
    journal = Journal(finished / "clients" / "states.jsonl").read()
    kept = {k: rounds for saved in journal for k, rounds in saved}  # after which round each last kept something
    server = last_server(finished, algorithm.init_server(task, Generator()))
    for k in range(4):
        state = algorithm.init_client(task, Generator())
        if k in kept:
            name = f"state-{kept[k]:06d}.safetensors"
            state = trees.rebuild(state, load_file(finished / "clients" / f"{k:05d}" / name))
        message = algorithm.broadcast(task, server, k)
        evaluated = evaluate_client(setup, message, state, 3, k)
        sent = dict(trees.named_leaves(message))
        personal = {**evaluated.personal, **{name: sent[there] for name, there in evaluated.shared.items()}}
        assert trees.equal(personal_tensors(finished, k), personal)
        probs = torch.from_numpy(evaluated.predictions.probs).float()
        assert torch.equal(table["probs"][table["client"] == k], probs)
        assert len(clients[k].test.y) == len(probs)
        loaded = load(finished, client=clients[k].name).predict(clients[k].test.x)
        assert torch.equal(torch.from_numpy(loaded.probability).float(), probs)


def test_the_record_has_a_line_for_every_round_client_and_metric(finished: Path) -> None:
    record = Run(finished).read_record()
    assert {line["round"] for line in record} == {1, 2, 3, 4}
    accuracy = {(line["round"], line.get("client")) for line in record if line.get("metric") == "accuracy"}
    assert accuracy == {(t, k) for t in (2, 4) for k in (None, 0, 1, 2, 3)}
    (scores,) = read_summary(finished).values()
    last = {line["metric"]: line["value"] for line in record if line["round"] == 4 and "client" not in line}
    assert all(last[name] == scores[name] for name in ("accuracy", "nll", "ece_pooled", "ece_worst"))
    seconds = [line["value"] for line in record if line.get("metric") == "seconds"]
    assert scores["seconds"] == pytest.approx(sum(seconds)) and len(seconds) == 4


def test_the_names_of_the_classes_are_kept_and_change_no_number(
    configure: Configure, folder: Path, tmp_path: Path
) -> None:
    sites = tmp_path / "sites"
    shutil.copytree(folder, sites)
    config = configure(data={"dataset": str(sites)})
    run(config, tmp_path / "bare")
    assert read_class_names(tmp_path / "bare") == {}
    (sites / "classes.txt").write_text("ill\nwell\nnaïve\n", encoding="utf-8")
    run(config, tmp_path / "named")
    assert read_class_names(tmp_path / "named") == {0: "ill", 1: "well", 2: "naïve"}
    for name in NAMES:
        named, bare = (load(tmp_path / run, client=name) for run in ("named", "bare"))
        assert named.classes == ("ill", "well", "naïve") and bare.classes == (0, 1, 2)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
        assert np.array_equal(named.predict(x).probability, bare.predict(x).probability)


def test_a_finished_run_is_told_and_not_touched(finished: Path) -> None:
    before = {file: ((finished / file).stat().st_mtime_ns, (finished / file).read_bytes()) for file in files(finished)}
    assert resume(finished, Progress()) == read_summary(finished)
    after = {file: ((finished / file).stat().st_mtime_ns, (finished / file).read_bytes()) for file in files(finished)}
    assert before == after


def test_clients_that_fail_are_events_in_the_record(configure: Configure, tmp_path: Path) -> None:
    config = configure(algorithm={"name": "fedavg", "lr": 1e9})  # steps so large that nothing finite comes up
    summary = run(config, tmp_path / "run")["fedavg"]
    events = [line for line in Run(tmp_path / "run").read_record() if "event" in line]
    assert len(events) == summary["events"] == 4 * 2
    assert {event["event"] for event in events} == {"skipped"}
    assert all("not finite" in event["reason"] for event in events)
    assert summary["accuracy"] >= 0  # of the network they all began with


@dataclass(frozen=True)
class Unjudgeable(FedAvg):
    """Learns, but nobody can predict."""

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        return torch.full((1, length(x), 3), float("nan"))


def test_a_run_of_which_nothing_can_be_judged_still_ends(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    setup = build_setup(config)._replace(algorithm=Unjudgeable())
    summary = start(config, tmp_path / "run", setup, Progress())["fedavg"]
    assert "accuracy" not in summary
    assert summary["events"] == 2 * 4
    assert resume(tmp_path / "run", Progress())["fedavg"] == summary


@dataclass(frozen=True)
class Private(FedAvg):
    """Every client gets a message of its own, of which its personal model holds one tensor twice, and one turned."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        return {name: leaf + client_id for name, leaf in server.items()}

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        weight = message["fc1.weight"]
        return super().personalise(task, {**message, "again": weight, "turned": weight.T}, client, data, rng)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_not_common_to_all_clients_is_in_each_ones_file(
    workers: int, configure: Configure, tmp_path: Path
) -> None:
    engine = {"kind": "processes", "workers": workers} if workers else {"kind": "serial"}
    config = configure(engine=engine)
    setup = build_setup(config)._replace(algorithm=Private())
    start(config, tmp_path / "run", setup, Progress())
    server = load_file(tmp_path / "run" / "checkpoint" / "000004" / "server.safetensors")
    for k in range(4):
        personal = personal_tensors(tmp_path / "run", k)
        assert torch.equal(personal["W/fc1.weight"], server["fc1.weight"] + k)
        assert torch.equal(personal["W/again"], server["fc1.weight"] + k)
        assert torch.equal(personal["W/turned"], server["fc1.weight"].T + k)


NEW = {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5, 5.0], "new_fraction": 0.4}


@pytest.mark.parametrize("name", ["fedavg", "metavd", "pfedbayes"])
def test_new_clients_are_scored_apart(name: str, configure: Configure, tmp_path: Path) -> None:
    config = configure(data=NEW, algorithm={"name": name})
    summary = run(config, tmp_path / "run")[name]
    assert list(summary["new"]) == ["0.5", "5.0"]
    table = load_file(tmp_path / "run" / "predictions.safetensors")
    correct = (table["probs"].argmax(1) == table["y"]).double()
    for alpha, ids in (("0.5", (3, 4)), ("5.0", (5, 6))):
        scores, own = summary["new"][alpha], torch.isin(table["client"], torch.tensor(ids))
        assert torch.equal(own, table["new_alpha"] == float(alpha))
        assert scores["accuracy"] == pytest.approx(correct[own].mean().item(), abs=1e-12)
        assert (scores["clients"], scores["examples"]) == (2, int(own.sum()))
        picked = table["probs"][own][torch.arange(int(own.sum())), table["y"][own]].double()
        assert scores["nll"] == pytest.approx(-picked.log().mean().item(), rel=1e-5)
    trained = table["new_alpha"] == 0
    assert set(table["client"][trained].tolist()) == {0, 1, 2}
    assert summary["accuracy"] == pytest.approx(correct[trained].mean().item(), abs=1e-12)
    assert (summary["clients"], summary["examples"]) == (3, int(trained.sum()))


def test_new_clients_leave_everything_else_as_it_was(configure: Configure, tmp_path: Path) -> None:
    """The same run without them, on what they leave to the others; pFedGP's models grow with a client's data."""
    config = configure(data={**NEW, "skew": 0.0, "new_fraction": 0.7}, algorithm={"name": "pfedgp"})
    setup = build_setup(config)
    whole = start(config, tmp_path / "whole", setup, Progress())["pfedgp"]
    alone = setup._replace(clients=setup.clients[:3])
    part = start(config, tmp_path / "part", alone, Progress())["pfedgp"]
    assert {**whole, "new": 0, "seconds": 0} == {**part, "new": 0, "seconds": 0}
    tables = [load_file(tmp_path / name / "predictions.safetensors") for name in ("whole", "part")]
    assert all(torch.equal(tables[0][key][tables[0]["client"] < 3], tables[1][key]) for key in tables[1])

    def record(name: str) -> list[dict[str, object]]:
        lines = Run(tmp_path / name).read_record()
        return [line for line in lines if "new_alpha" not in line and line.get("metric") != "seconds"]

    assert record("whole") == record("part")


def test_the_record_tells_of_new_clients_after_the_last_round(configure: Configure, tmp_path: Path) -> None:
    run(configure(data=NEW), tmp_path / "run")
    lines = [line for line in Run(tmp_path / "run").read_record() if line.get("client", 0) >= 3]
    assert {(line["round"], line["client"], line["new_alpha"]) for line in lines} == {
        (4, 3, 0.5), (4, 4, 0.5), (4, 5, 5.0), (4, 6, 5.0),
    }  # fmt: skip
    assert {"accuracy", "nll", "ece", "examples"} <= {line["metric"] for line in lines}
    assert not any("new_alpha" in line for line in Run(tmp_path / "run").read_record() if line not in lines)


def test_new_clients_that_cannot_be_judged_are_events(configure: Configure, tmp_path: Path) -> None:
    config = configure(data=NEW)
    setup = build_setup(config)._replace(algorithm=Unjudgeable())
    summary = start(config, tmp_path / "run", setup, Progress())["fedavg"]
    assert summary["new"] == {"0.5": {}, "5.0": {}}
    events = [line for line in Run(tmp_path / "run").read_record() if line.get("event") == "not judged"]
    assert [line.get("new_alpha") for line in events] == 6 * [None] + [0.5, 0.5, 5.0, 5.0]


def test_the_summary_tells_the_mean_rank_that_clients_keep(configure: Configure, tmp_path: Path) -> None:
    """Of each client the rank after its last round; nothing for algorithms without ranks."""
    assert "rank" not in run(configure(), tmp_path / "plain")["fedavg"]
    gates = {"max_rank": 3, "ranks": "printed", "gate_lr": 0.85, "gate_penalty": 30.0}
    fields = {"name": "lr-bpfl", "mask_steps": 4, "model_steps": 1, **gates}
    summary = run(configure(algorithm=fields), tmp_path / "masks")["lr-bpfl"]
    told = [line for line in Run(tmp_path / "masks").read_record() if line.get("metric") == "rank"]
    kept = {line["client"]: line["value"] for line in told}
    assert len({line["value"] for line in told}) > 1  # some gates closed on the way
    assert summary["rank"] == pytest.approx(statistics.fmean(kept.values()))


@pytest.mark.parametrize(
    ("native", "precision", "told"), [(False, "bf16", 1), (True, "bf16", 0), (False, "float32", 0)]
)
def test_bf16_is_remarked_where_the_cpu_has_none(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool, precision: str, told: int
) -> None:
    monkeypatch.setattr(runner, "native_bf16", lambda: native)
    heard: list[str] = []
    config = configure(federation={"precision": precision})
    start(config, tmp_path / "run", build_setup(config), Progress(tell=heard.append))
    assert heard == told * [runner.SLOW_BF16]
