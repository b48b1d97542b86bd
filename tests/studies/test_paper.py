"""The paper's items as grids: which runs they ask for, and what stands beside them."""

import dataclasses
from typing import Any

import pytest

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.data import load
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import Config, make_algorithm
from lrbpfl.experiments.deal import deal
from lrbpfl.experiments.store import fingerprint
from lrbpfl.metrics.calibration import BINS
from lrbpfl.studies import costs
from lrbpfl.studies.costs import Work
from lrbpfl.studies.items import ITEMS, ONE_STEP, OVERHEAD, Row
from lrbpfl.studies.paper import SCALES, TUNED, estimate, examples, examples_per_client, runs, wanted


@pytest.mark.parametrize("name", ITEMS)
def test_every_printed_value_has_its_place(name: str) -> None:
    """A row's printed values are as many as there are columns, and belong to a row of the item."""
    item = ITEMS[name]
    rows = {row.name for row in item.rows}
    for _, printed in item.scores:
        for row, values in printed.items():
            assert len(values) == len(item.columns)
            assert row in rows or name == "reliability"
    assert set(item.bins) <= rows and all(len(values) == BINS for values in item.bins.values())


@pytest.mark.parametrize("name", ["calibration", "accuracy", "data-size"])
def test_tables_of_methods_have_the_papers_eight_and_two_below(name: str) -> None:
    rows = [row.name for row in ITEMS[name].rows]
    assert set(rows) == set(ALGORITHMS) and rows[-2:] == ["local", "fedavg-ft"]
    assert set(ITEMS[name].scores[0].printed) == set(rows[:-2])


@pytest.mark.parametrize("name", ITEMS)
def test_every_run_writes_down_how_its_parts_are_drawn(name: str) -> None:
    for run in runs(name, "mini", [0]):
        written = run.config.tables()["data"]
        assert written["stratified"] is True
        assert written["dataset"] == "speakers" or written["train_fraction"] in (0.1, 0.4, 0.45)


def test_the_papers_scale_is_the_papers() -> None:
    (run,) = (run for run in runs("rank-map", "paper", [3]))
    data, federation = run.config.data, run.config.federation
    assert (data.clients, federation.cohort, federation.rounds, federation.seed) == (50, 10, 1000, 3)
    fields = dataclasses.asdict(run.config.algorithm)
    assert fields["batch_size"] == 32
    assert all(scale.cohort / scale.clients == 0.2 for scale in SCALES.values())


def test_tuned_rates_belong_to_the_scale_they_were_tuned_for() -> None:
    def fedavg(scale: str) -> object:
        return next(run.config.algorithm for run in runs("calibration", scale, [0]) if run.row.name == "fedavg")

    assert fedavg("paper") == fedavg("half") == FedAvg()
    assert fedavg("mini") == FedAvg(weights="kaiming")


@pytest.mark.parametrize(
    ("item", "scale", "name"),
    [
        ("calibration", "mini", "lr-bpfl"),
        ("calibration", "paper", "lr-bpfl:paper"),
        ("label-prior", "mini", "lr-bpfl"),
        ("label-prior", "paper", "lr-bpfl"),
    ],
)
def test_lr_bpfl_has_the_fields_that_belong_to_the_setting(item: str, scale: str, name: str) -> None:
    found = {run.config.algorithm_name for run in runs(item, scale, [0]) if run.row.algorithm == "lr-bpfl"}
    assert found == {name}


@pytest.mark.parametrize(("row", "rate", "without"), [("fedavg-ft", "ft_lr", 0.02), ("per-fedavg", "beta", 0.05)])
def test_rates_that_depend_on_the_label_prior_follow_it(row: str, rate: str, without: float) -> None:
    def value(item: str, scale: str) -> Any:
        run = next(run for run in runs(item, scale, [0]) if run.row.name == row)
        return dataclasses.asdict(run.config.algorithm)[rate]

    assert (value("calibration", "mini"), value("label-prior", "mini")) == (without, TUNED[row][rate])
    assert value("calibration", "paper") == value("label-prior", "paper")


def test_items_share_runs() -> None:
    """The calibration table's LR-BPFL is the one with adaptive rank, of the rank map, and of the coordinate descent.

    The last only at the paper's scale: where the federation chooses, two ways to update would differ in two things.
    """

    def keys(item: str, row: str, scale: str = "mini") -> set[str]:
        return {fingerprint(run.config) for run in runs(item, scale, [0]) if run.row.name == row}

    assert keys("calibration", "lr-bpfl") == keys("adaptive-rank", "with")
    assert keys("calibration", "lr-bpfl", "paper") == keys("coordinate", "coordinate", "paper")
    assert keys("rank-map", "lr-bpfl") < keys("calibration", "lr-bpfl")
    assert keys("data-size", "fedbe") == keys("calibration", "fedbe") | keys("accuracy", "fedbe")
    assert not keys("label-prior", "fedavg") & keys("calibration", "fedavg")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("item", "field", "values"),
    [("coordinate", "update", {"joint", "coordinate"}), ("adaptive-rank", "ranks", {"fixed", "evidence", "printed"})],
)
def test_an_ablation_differs_in_one_field(item: str, scale: str, field: str, values: set[str]) -> None:
    one, other = (dataclasses.asdict(run.config.algorithm) for run in list(runs(item, scale, [0]))[:2])
    assert [name for name in one if one[name] != other[name]] == [field]
    assert {one[field], other[field]} <= values


def test_all_methods_of_a_table_train_on_the_same_images() -> None:
    """Small data aside: only who asks for it gives some of them away there."""
    for name in ITEMS:
        for column in ITEMS[name].columns:
            same = {"calibration_fraction": 0.0, **({} if column.tuned else {"public_fraction": 0.0})}
            found = [run.config.data for run in runs(name, "mini", [0]) if run.column == column]
            assert len({data.model_copy(update=same) for data in found}) == 1


DIGITS = ["digits, labels", "digits, Dirichlet", "digits, i.i.d.", "digits, features", "digits, concept"]
SMALL = {"speakers": 15, **dict.fromkeys(DIGITS, 20)}  # clients


def transfer(scale: str) -> dict[tuple[str, str], Config]:
    return {(run.row.name, run.column.name): run.config for run in runs("transfer", scale, [0])}


def test_small_data_are_the_same_at_every_scale_and_everybody_has_its_defaults() -> None:
    mini, paper = transfer("mini"), transfer("paper")
    rows = {row for row, _ in mini}
    assert rows == {*ALGORITHMS, "fedavg-ft+temper"}
    for column, clients in SMALL.items():
        for row in rows:
            config = mini[row, column]
            assert fingerprint(config) == fingerprint(paper[row, column])
            assert config.algorithm == make_algorithm(row, {}) and config.federation.label_prior == 1.0
            size = (config.data.clients, config.federation.cohort, config.federation.rounds, config.federation.model)
            assert size == (clients, 5, 30, "mlp")


@pytest.mark.parametrize("column", SMALL)
def test_small_data_can_be_dealt_and_some_forty_examples_train(column: str) -> None:
    """By dealing them: which data the estimates take to be how large is right, too."""
    config = transfer("mini")["fedavg", column]
    data = load(config.data.dataset)
    clients = deal(data, config.data, 0)
    trained = sum(len(split.train) for split in clients.values()) / len(clients)
    assert trained == pytest.approx({"speakers": 33}.get(column, 40), abs=1)
    assert (len(clients), len(data.y)) == (SMALL[column], examples(config))
    assert examples_per_client(config) == pytest.approx(trained, abs=1)


def test_shifts_come_on_top_of_equal_clients() -> None:
    shifts = {column: transfer("mini")["fedavg", column].data for column in SMALL}
    equal = shifts["digits, i.i.d."].model_dump()
    assert {**equal, "shift": "features"} == shifts["digits, features"].model_dump()
    assert {**equal, "shift": "concept"} == shifts["digits, concept"].model_dump()


def test_only_the_tempered_row_and_fedbe_give_training_data_away() -> None:
    given = {row: config.data for (row, column), config in transfer("mini").items() if column == "speakers"}
    assert {row for row, data in given.items() if data.calibration_fraction} == {"fedavg-ft+temper"}
    assert {row for row, data in given.items() if data.public_fraction} == {"fedbe"}


@pytest.mark.parametrize("scale", SCALES)
def test_cifar_columns_of_transfer_are_runs_of_the_label_prior(scale: str) -> None:
    ours = {fingerprint(config) for config in transfer(scale).values()}
    assert {fingerprint(run.config) for run in runs("label-prior", scale, [0])} <= ours
    tempered, plain = (transfer(scale)[row, "CIFAR-10 5/10, features"] for row in ("fedavg-ft+temper", "fedavg-ft"))
    assert tempered.algorithm == plain.algorithm and plain.data.shift == "features"


def test_new_clients_are_one_run_with_a_column_for_each_alpha() -> None:
    found = list(runs("new-clients", "mini", [0]))
    assert len({fingerprint(run.config) for run in found}) == len(ITEMS["new-clients"].rows)
    config = found[0].config.data
    assert (config.partition, config.alpha, config.new_clients) == ("dirichlet", 0.1, 10)
    assert config.new_alpha == (0.1, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("row", ONE_STEP, ids=lambda row: row.name)
def test_the_overhead_is_of_a_single_step(row: Row) -> None:
    """One batch goes forward: once, or under each of four masks; for pFedGP all examples, which also make its tree."""
    name, algorithm, fields = row
    work = costs.work(make_algorithm(algorithm, fields), 64)
    assert work.round == pytest.approx({"lr-bpfl": 4 * 32, "pfedgp": (1 + 1 / 3) * 64}.get(name, 32))


def test_what_only_goes_forward_counts_a_third() -> None:
    """FedBE: ten drawn teachers, the mean and five clients label 240 inputs; 40 steps of 128 for a student."""
    plain, fedbe = costs.work(FedAvg(), 64), costs.work(FedBE(), 64)
    assert plain.own == plain.server == 0 and plain.predict == pytest.approx(1 / 3)
    assert fedbe.server == pytest.approx((10 + 1 + 5) * 240 / 3 + 40 * 128)


def test_names_are_checked() -> None:
    assert wanted(["all"], "mini") == [OVERHEAD, *ITEMS]
    assert wanted(["noisy", "accuracy", "noisy"], "half") == ["noisy", "accuracy"]
    with pytest.raises(BadInput, match="did you mean 'calibration'"):
        wanted(["calibraton"], "mini")
    with pytest.raises(BadInput, match="unknown scale"):
        wanted(["all"], "tiny")


def test_an_estimate_counts_everybodys_steps() -> None:
    """By hand: 4 clients a round and 40 rounds share two workers; the server and its 3 batches wait for nobody."""
    (run,) = runs("rank-map", "mini", [0])
    work = Work(round=320, own=64, server=96, predict=2)
    clients = (4 * 40 * 10 + 20 * 2) / 2
    judged = 54_000 / 32 * 2 / 2
    assert estimate(run.config, work, step_seconds=0.1, workers=2) == pytest.approx((clients + judged + 40 * 3) * 0.1)
    assert examples_per_client(run.config) == 300
    seconds = {r.row.name: estimate(r.config, work, 0.1, 2) for r in runs("reliability", "mini", [0])}
    assert seconds["pfedbayes"] == pytest.approx(1.75 * seconds["fedavg"])  # a step of it takes longer
