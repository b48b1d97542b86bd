"""What a report shows is what the runs recorded, as far as it is there."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lrbpfl.errors import BadInput
from lrbpfl.experiments.store import Run
from lrbpfl.reports.collect import collect, differing
from tests.reports.conftest import write_run

FILES = {"summary.json", "metrics.jsonl", "predictions.safetensors", "clients.json", "classes.json"}


def test_the_bins_add_up_to_the_recorded_ece(tmp_path: Path) -> None:
    (result,) = collect([write_run(tmp_path / "run")])
    views = [(result.pooled, result.scores["ece_pooled"])]
    views += [(client["view"], client["scores"]["ece"]) for client in result.clients]
    for view, recorded in views:
        assert view is not None
        total = sum(examples for _, examples, _, _ in view["bins"])
        gaps = sum(examples * abs(accuracy - confidence) for _, examples, confidence, accuracy in view["bins"])
        assert gaps / total == pytest.approx(recorded, abs=1e-5)


def test_confusion_and_uncertainty_count_every_prediction(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (result,) = collect([path])
    kept = load_file(path / "predictions.safetensors")
    mine = kept["client"] == 1
    guesses = kept["probs"][mine].argmax(axis=1)
    view = result.clients[1]["view"]
    assert view is not None
    for label, guess, examples in view["confusion"]:
        assert examples == ((kept["y"][mine] == label) & (guesses == guess)).sum()
    assert sum(examples for _, _, examples in view["confusion"]) == 60
    right = guesses == kept["y"][mine]
    for name, chosen in (("right", right), ("wrong", ~right)):
        group = view["right"] if name == "right" else view["wrong"]
        assert group["examples"] == sum(group["counts"]) == chosen.sum()
        total = kept["total"][mine][chosen]
        assert group["aleatoric"] + group["epistemic"] == pytest.approx(total.mean(), rel=1e-4)
        assert group["counts"][0] == (total < np.log(4) / 12).sum()


def test_the_worst_client_has_the_largest_ece(tmp_path: Path) -> None:
    (result,) = collect([write_run(tmp_path / "run", clients=6)])
    eces = [client["scores"]["ece"] for client in result.clients]
    assert result.worst == int(np.argmax(eces))
    assert max(eces) == pytest.approx(result.scores["ece_worst"])


def test_a_closed_gate_is_no_rank(tmp_path: Path) -> None:
    layers = ("conv1.weight", "fc.weight")
    (result,) = collect([write_run(tmp_path / "run", algorithm="lr-bpfl", clients=4, layers=layers)])
    assert result.layers == ["conv1", "fc"]
    assert [client["ranks"] for client in result.clients] == [[1, 1], [2, 2], [3, 3], [1, 1]]
    assert result.max_rank == 3


def test_a_cell_of_a_search_shows_the_ranks_it_recorded(tmp_path: Path) -> None:
    path = write_run(tmp_path / "cell", algorithm="lr-bpfl")
    Run(path).record.append([{"round": t, "client": 0, "metric": "rank", "value": 3.0 - t} for t in (0, 1)])
    (result,) = collect([path])
    assert result.layers == [] and result.clients[0]["ranks"] is None
    assert [client["scores"].get("rank") for client in result.clients] == [2.0, None, None]


def test_scores_are_those_of_the_last_judged_round(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", clients=1)
    Run(path).record.append([{"round": 5, "client": 0, "metric": "loss", "value": 0.5}])
    Run(path).record.append([{"round": 3, "client": 0, "metric": "accuracy", "value": 0.125}])
    (result,) = collect([path])
    assert result.clients[0]["scores"]["accuracy"] == pytest.approx(result.scores["accuracy"])
    assert [t for t, _ in result.curves["accuracy"]] == [2, 4]


def test_a_run_in_which_nobody_was_judged_is_shown_all_the_same(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "predictions.safetensors").unlink()
    (path / "metrics.jsonl").write_text('{"round": 1, "client": 2, "event": "skipped", "reason": "it raised"}\n')
    (path / "summary.json").write_text(json.dumps({"fedavg": {"seconds": 1.0, "nll": float("nan")}}))
    (result,) = collect([path])
    assert (result.clients, result.worst, result.pooled) == ([], None, None)
    assert result.scores == {"seconds": 1.0, "nll": None}
    assert [event["reason"] for event in result.events] == ["it raised"]


def test_an_unfinished_run_is_refused_with_the_way_to_finish_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "summary.json").unlink()
    with pytest.raises(BadInput, match=f"not finished: go on with: lrbpfl resume {path}"):
        collect([path])


def comparison(path: Path) -> Path:
    for name in ("lr-bpfl:paper", "fedavg"):
        write_run(path / name.replace(":", "-"), algorithm=name)
    (path / "config.toml").write_text('[compare]\nalgorithms = ["lr-bpfl:paper", "fedavg"]\n')
    (path / "summary.json").write_text("{}")
    return path


def test_a_comparison_brings_its_runs(tmp_path: Path) -> None:
    results = collect([comparison(tmp_path / "both")])
    assert [result.name for result in results] == ["lr-bpfl:paper", "fedavg"]
    assert differing(results) == []


def test_a_comparison_is_to_be_resumed_as_a_whole(tmp_path: Path) -> None:
    path = comparison(tmp_path / "both")
    (path / "fedavg" / "summary.json").unlink()
    with pytest.raises(BadInput, match=f"fedavg holds no summary.json.*lrbpfl resume {path}$"):
        collect([path])


def test_runs_of_one_algorithm_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "one", tmp_path / "a" / "two", tmp_path / "b" / "two", tmp_path / "c" / "three"]
    for path in paths:
        write_run(path, algorithm="local" if path.name == "three" else "fedavg")
    names = [result.name for result in collect(paths)]
    assert names == ["fedavg (one)", f"fedavg ({paths[1]})", f"fedavg ({paths[2]})", "local"]


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with pytest.raises(BadInput, match="named twice"):
        collect([path, path.parent / "." / "run"])


def test_other_conditions_are_found_but_for_those_that_change_no_number(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", federation={"seed": 1, "evaluate_every": 1})
    assert differing(collect([one, other])) == ["federation.seed"]


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_damaged_file_is_told_in_a_sentence(tmp_path: Path, file: str) -> None:
    path = write_run(tmp_path / "run")
    (path / file).write_bytes(b"{damaged")
    with pytest.raises(BadInput, match=f"{path / file} is damaged"):
        collect([path])


def test_new_clients_stand_apart(tmp_path: Path) -> None:
    """They are judged, too, but the pooled figures and the worst client are of those who trained."""
    names = [*"abc", "new-1", "new-2", "new-3", "new-4"]
    (without,) = collect([write_run(tmp_path / "without", names=names)])
    path = write_run(tmp_path / "run", new=(1.0, 0.5), names=names)
    (result,) = collect([path])
    assert (result.pooled, result.worst, result.scores) == (without.pooled, without.worst, without.scores)
    assert result.clients[:3] == without.clients
    assert [(client["name"], client["new_alpha"]) for client in result.clients[3:]] == [
        ("new-1", 1.0), ("new-2", 1.0), ("new-3", 0.5), ("new-4", 0.5)
    ]  # fmt: skip
    assert max(client["scores"]["ece"] for client in result.clients[3:]) > result.scores["ece_worst"]
    recorded = json.loads((path / "summary.json").read_text())["fedavg"]["new"]
    assert list(result.new) == [0.5, 1.0]
    assert result.new[0.5] == pytest.approx(recorded["0.5"], rel=1e-5)


@pytest.mark.parametrize("gone", ["metrics.jsonl", "predictions.safetensors"])
def test_a_new_client_is_known_from_either_file(tmp_path: Path, gone: str) -> None:
    path = write_run(tmp_path / "run", new=(0.5,))
    (path / gone).unlink()
    (result,) = collect([path])
    assert [client["new_alpha"] for client in result.clients] == [None, None, None, 0.5, 0.5]
    if result.pooled:
        assert sum(examples for _, examples, _, _ in result.pooled["bins"]) == 180


def test_a_score_of_new_clients_that_is_no_number_is_left_blank(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", new=(0.5,))
    summary = json.loads((path / "summary.json").read_text())
    summary["fedavg"]["new"]["0.5"]["nll"] = float("inf")
    (path / "summary.json").write_text(json.dumps(summary))
    (result,) = collect([path])
    assert result.new[0.5]["nll"] is None


def test_classes_have_their_names_where_the_run_wrote_them(tmp_path: Path) -> None:
    named = write_run(tmp_path / "named", class_names=["cat", "dog", "owl", "fox"])
    first, second = collect([named, write_run(tmp_path / "bare")])
    assert first.class_names == {0: "cat", 1: "dog", 2: "owl", 3: "fox"} and second.class_names == {}


def test_a_key_that_only_one_run_has_is_a_difference(tmp_path: Path) -> None:
    """What is off is not written down: noise in one run and none in the other are not the same conditions."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", federation={"clip": 1.0, "judged_last": 2, "evaluate_every": 1})
    assert differing(collect([tmp_path / "a", tmp_path / "b"])) == ["federation.judged_last", "federation.clip"]
