"""The table a run ends with."""

import io
from typing import Any

from rich.console import Console

from lrbpfl.reports.tables import footnote, new_clients_table, study_table, summary_table
from lrbpfl.studies.tuning import Scored

SCORES: dict[str, Any] = {
    "accuracy": 0.8765,
    "nll": 0.4321,
    "ece_pooled": 0.0312,
    "ece_pooled_floor": 0.0029,
    "ece_worst": 0.1271,
    "ece_floor_worst": 0.0231,
    "bytes_up": 1_500_000,
    "bytes_down": 2_500_000,
    "seconds": 12.34,
    "clients": 20.0,
    "examples": 54000.0,
    "examples_train": 6000,
    "evaluated": "each client's own model after round 40, on its own test split",
}


def shown(summary: dict[str, dict[str, Any]]) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(summary_table(summary), new_clients_table(summary) or "")
    return capture.get()


def test_every_score_is_there_in_eighty_columns() -> None:
    row = next(line for line in shown({"lr-bpfl:paper": SCORES}).splitlines() if "lr-bpfl:paper" in line)
    assert row.split() == ["lr-bpfl:paper", "87.65", "0.432", "0.031", "0.003", "0.127", "0.023", "4.0", "12.3"]


def test_the_best_are_bold_and_it_is_said_what_that_means() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(summary_table({"fedavg": SCORES, "local": SCORES}, {"accuracy": {"local"}, "nll": set()}))
    own = {name: next(x for x in capture.get().splitlines() if name in x) for name in ("fedavg", "local")}
    assert "\x1b[1m87.65\x1b[0m" in own["local"] and "\x1b[1m" not in own["fedavg"]
    assert own["local"].count("\x1b[1m") == 1
    assert "Bold: the best" in capture.get() and "Bold" not in shown({"fedavg": SCORES, "local": SCORES})


def test_a_run_without_scores_shows_dashes() -> None:
    costs = {key: SCORES[key] for key in ("bytes_up", "bytes_down", "seconds", "evaluated")}
    row = next(line for line in shown({"fedavg": costs}).splitlines() if "fedavg" in line)
    assert row.split() == ["fedavg", *6 * ["-"], "4.0", "12.3"]
    assert "0 clients" in footnote({"fedavg": costs})


def test_the_footnote_says_what_was_judged() -> None:
    assert "own test split; 20 clients, 6000 examples trained, 54000 judged" in footnote({"fedavg": SCORES})


def test_new_clients_have_a_row_for_each_alpha() -> None:
    text = shown({"fedavg": {**SCORES, "new": {"0.1": SCORES, "1.0": {}}}})
    rows = [line.split() for line in text[text.index("New clients") :].splitlines() if "fedavg" in line]
    assert rows == [
        ["fedavg", "0.1", "87.65", "0.432", "0.031", "0.003", "0.127", "0.023"],
        ["fedavg", "1.0", *6 * ["-"]],
    ]
    assert "New clients" not in shown({"fedavg": SCORES})


def test_the_footnote_tells_of_a_label_prior() -> None:
    scores = {"evaluated": "each client's own model", "clients": 3, "examples": 30}
    assert "Label prior: 0.1" in footnote({"fedavg": {**scores, "label_prior": 0.1}})
    assert "Label prior" not in footnote({"fedavg": {**scores, "label_prior": 0.0}}) + footnote({"fedavg": scores})


def test_the_footnote_tells_who_is_tempered() -> None:
    scores = {"evaluated": "each client's own model", "clients": 3, "examples": 30}
    summary = {"fedavg": {**scores, "temper": "no"}, "fedavg+temper": {**scores, "temper": "all"}, "old": scores}
    assert footnote(summary).endswith("\nTempered after training, with one temperature for all clients: fedavg+temper.")
    assert "Tempered" not in footnote({"fedavg": summary["fedavg"], "old": scores})


def test_a_study_shows_changes_above_their_spread_and_ranks_where_there_are_any() -> None:
    base = Scored("as it is", SCORES, nll_spread=0.02, nll_change=None, nll_change_spread=None, folders=(), failures=())
    changed = base._replace(label="lr=1", nll_change=-0.0123, nll_change_spread=0.004)

    def text(*rows: Scored) -> list[list[str]]:
        console = Console(width=80, file=io.StringIO())
        with console.capture() as capture:
            console.print(study_table(rows))
        return [line.split() for line in capture.get().splitlines()][-5:-1]

    scores = ["87.65", "0.031", "0.003", "0.127"]
    assert text(base, changed) == [
        ["as", "it", "is", "0.432", *scores, "12"],
        ["±0.020"],
        ["lr=1", "0.432", "-0.012", *scores, "12"],
        ["±0.020", "±0.004"],
    ]
    with_ranks = text(base._replace(scores={**SCORES, "rank": 1.5}), changed)
    assert with_ranks[0] == ["as", "it", "is", "0.432", *scores, "1.5", "12"]
    assert with_ranks[2] == ["lr=1", "0.432", "-0.012", *scores, "-", "12"]


def test_a_long_setting_is_folded_and_never_cut_in_eighty_columns() -> None:
    label = "algorithm.server_optimiser=momentum, algorithm.server_lr=0.3"
    scores = {**SCORES, "rank": 1.5, "seconds": 12345.0}
    row = Scored(label, scores, nll_spread=0.02, nll_change=-0.01, nll_change_spread=0.004, folders=(), failures=())
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(study_table([row]))
    lines = capture.get().splitlines()
    width = next(line.index("NLL") for line in lines if "NLL" in line) - 4  # a value is three characters wider
    assert "".join(line[:width].strip() for line in lines[5:]) == "server_optimiser=momentum,server_lr=0.3"
    assert "…" not in capture.get()


def test_the_footnote_tells_an_epsilon_where_there_is_one() -> None:
    scores = {"evaluated": "each client's own model", "clients": 3, "examples": 30}
    text = footnote({"fedavg": {**scores, "epsilon": 12.345, "delta": 1e-5}, "local": scores})
    assert text.endswith("for all that a client holds: fedavg 12.3 (at delta 1e-05).")
    assert "Epsilon" not in footnote({"local": scores})


def test_the_footnote_says_of_how_many_clients_those_judged_are_a_part() -> None:
    scores = {"evaluated": "x", "clients": 4.0, "examples": 132.0, "examples_train": 99}
    assert "; 4 clients, 99 examples" in footnote({"fedavg": {**scores, "clients_train": 4}})
    assert "; 4 of 15 clients, 99 examples" in footnote({"fedavg": {**scores, "clients_train": 15}})
