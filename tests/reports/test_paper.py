"""Pages about the paper's items: our scores in the right places, printed ones beside them, gaps shown as gaps."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lrbpfl.errors import BadInput
from lrbpfl.experiments.store import Run
from lrbpfl.reports.paper import page, scored
from lrbpfl.studies import paper
from lrbpfl.studies.cells import cell_folder
from lrbpfl.studies.items import ITEMS, Column, Item, Row, Score
from lrbpfl.studies.paper import Scale, runs

Finish = Callable[..., None]


@pytest.fixture
def finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Finish:
    """An item of two methods and two columns, one of them about new clients; and a way to finish runs of it."""
    data = {"dataset": "digits", "new_clients": 2, "new_alpha": [0.5]}
    columns = (Column("old", data), Column("new", data, new_alpha=0.5))
    rows = (Row("fedavg", "fedavg"), Row("slow", "fedavg", {"lr": 0.01}))
    scores = (Score("accuracy", {"fedavg": (50.0, 40.5)}), Score("ece_pooled"), Score("rank"))
    monkeypatch.setitem(ITEMS, "toy", Item("Toy", rows, columns, scores))
    monkeypatch.setitem(paper.SCALES, "mini", Scale(5, 2, 3))

    def finish(row: str, seed: int, *, clients: Sequence[float] = (), **scores: Any) -> None:
        """A run with these scores, and with clients of these accuracies."""
        run = next(run for run in runs("toy", "mini", [seed]) if run.row.name == row)
        folder = cell_folder(tmp_path, run.config)
        record = Run.create(folder, run.config).record.append
        for k, accuracy in enumerate(clients):
            own = {"accuracy": accuracy, "examples": 10.0}
            record({"round": 1, "client": k, "metric": metric, "value": value} for metric, value in own.items())
        (folder / "summary.json").write_text(json.dumps({"fedavg": scores}))

    return finish


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The cells of a table, by the first one."""
    block = text.split(f"## {title}")[1].split("##")[0]
    lines = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines[2:]}


def test_a_table_has_means_spreads_floors_and_printed_values(finish: Finish, tmp_path: Path) -> None:
    new = {"0.5": {"accuracy": 0.25}}
    finish("fedavg", 0, accuracy=0.5, ece_pooled=0.1, ece_pooled_floor=0.01, new=new, seconds=1800.0)
    finish("fedavg", 1, accuracy=0.6, ece_pooled=0.3, ece_pooled_floor=0.03, new=new, seconds=1800.0)
    finish("slow", 0, accuracy=0.7, ece_pooled=0.25, ece_pooled_floor=0.02, new={"0.5": {"accuracy": 0.1}}, seconds=0.0)
    text = page("toy", "mini", tmp_path)
    assert text is not None
    accuracy = rows_of(text, "Accuracy")
    assert accuracy["fedavg"] == ["55.00 ± 7.07", "50", "25.00 ± 0.00", "40.5"]
    assert accuracy["slow"] == ["70.00 (1 of 2 seeds)", "–", "10.00 (1 of 2 seeds)", "–"]
    assert rows_of(text, "ECE")["fedavg"] == ["0.200 ± 0.141 (0.020)", "–"]
    first = page("toy", "mini", tmp_path, 1)
    assert first is not None and "report toy --scale mini --seeds 1\n" in first
    assert rows_of(first, "Accuracy")["fedavg"] == ["50.00", "50", "25.00", "40.5"]
    assert (
        "5 clients, 2 a round, 3 rounds, rates as printed" in text
        and "Seeds: 0, 1." in text
        and "Runs: 3, 1.0 hours" in text
    )


def test_a_single_seed_has_its_interval(finish: Finish, tmp_path: Path) -> None:
    interval = {"ece_pooled_low": 0.08, "ece_pooled_high": 0.125}
    finish("slow", 0, ece_pooled=0.1, ece_pooled_floor=0.01, **interval, new={"0.5": {"ece_pooled": 0.2}}, seconds=1.0)
    text = page("toy", "mini", tmp_path)
    assert text is not None
    assert rows_of(text, "ECE")["slow"] == ["0.100 (0.010; 0.080 to 0.125)", "0.200"]


def test_the_best_over_seeds_is_bold_where_it_is_always_better(finish: Finish, tmp_path: Path) -> None:
    for seed, (accuracy, slow) in enumerate([(0.5, 0.7), (0.3, 0.52), (0.6, 0.79), (0.4, 0.6), (0.5, 0.71)]):
        finish("fedavg", seed, accuracy=accuracy, ece_pooled=0.1, rank=2.0, new={"0.5": {"accuracy": 0.2}}, seconds=1.0)
        mixed = 0.05 if seed else 0.4
        finish("slow", seed, accuracy=slow, ece_pooled=mixed, rank=1.0, new={"0.5": {"accuracy": 0.1}}, seconds=1.0)
    text = page("toy", "mini", tmp_path)
    assert text is not None
    table = rows_of(text, "Accuracy")
    assert table["slow"][0] == "**66.40 ± 10.50**" and table["fedavg"][2] == "**20.00 ± 0.00**"
    assert str(table).count("**") == 4
    assert "**" not in str(rows_of(text, "ECE"))  # once worse: a mean that is better proves nothing
    assert rows_of(text, "Mean rank")["slow"] == ["1.00 ± 0.00", "–"]
    one = page("toy", "mini", tmp_path, 1)
    assert one is not None and "**" not in one  # these runs recorded no clients


def test_of_a_single_seed_clients_decide(finish: Finish, tmp_path: Path) -> None:
    new = {"0.5": {"accuracy": 0.5}}
    finish("fedavg", 0, accuracy=0.6, clients=[0.5, 0.6, 0.7], ece_pooled=0.2, new=new, seconds=1.0)
    finish("slow", 0, accuracy=0.7, clients=[0.59, 0.7, 0.81], ece_pooled=0.1, new=new, seconds=1.0)
    text = page("toy", "mini", tmp_path)
    assert text is not None
    assert [row[0] for row in rows_of(text, "Accuracy").values()] == ["60.00", "**70.00**"]
    assert "**" not in str(rows_of(text, "ECE"))  # three clients without predictions


def test_a_page_names_the_commands_that_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    columns = tuple(Column(f"skew {skew}", {"dataset": "digits", "skew": skew}) for skew in (0.5, 1.0, 2.0))
    item = Item("Toy", (Row("fedavg", "fedavg"),), columns, (Score("accuracy"),))
    monkeypatch.setitem(ITEMS, "toy", item)
    for run in runs("toy", "mini", range(3)):
        if run.seed == 0 or run.column.name == "skew 1.0":
            folder = cell_folder(tmp_path, run.config)
            folder.mkdir()
            (folder / "summary.json").write_text(json.dumps({"fedavg": {"accuracy": 0.5, "seconds": 1.0}}))
    text = page("toy", "mini", tmp_path)
    assert text is not None and "Seeds: 0 (skew 1.0: 0, 1, 2). Runs: 5" in text
    start = "lrbpfl paper run toy --scale mini --seeds"
    assert f"{start} 1\n{start} 3 --only 'skew 1.0'\nlrbpfl paper report toy --scale mini\n" in text


def test_seeds_can_be_counted_from_another_one(finish: Finish, tmp_path: Path) -> None:
    """A page of fresh seeds has nothing of those that were looked at before."""
    for seed, accuracy in ((0, 0.9), (3, 0.5), (4, 0.6), (30, 0.1)):
        finish("fedavg", seed, accuracy=accuracy, new={"0.5": {"accuracy": 0.25}}, seconds=1.0)
    text = page("toy", "mini", tmp_path, first=3)
    assert text is not None and "Seeds: 3, 4. Runs: 2" in text
    assert rows_of(text, "Accuracy")["fedavg"][0] == "55.00 ± 7.07"
    about = "toy --scale mini --first-seed 3"
    assert f"lrbpfl paper run {about} --seeds 2\nlrbpfl paper report {about}\n" in text
    assert page("toy", "mini", tmp_path, first=5) is None


def test_what_is_not_finished_is_a_dash(finish: Finish, tmp_path: Path) -> None:
    assert page("toy", "mini", tmp_path) is None
    finish("slow", 0, accuracy=0.7, seconds=1.0, new={"0.5": {"accuracy": 0.1}})
    text = page("toy", "mini", tmp_path)
    assert text is not None and rows_of(text, "Accuracy")["fedavg"] == ["–", "50", "–", "40.5"]
    assert scored(tmp_path, next(iter(runs("toy", "mini", [1])))) is None


def test_compute_that_depends_on_the_data_is_told_for_each_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Gaussian process sees all of a client's images, or 600; steps of FedAvg are on 32, however many there are."""
    columns = tuple(Column(f"{share}", {"dataset": "cifar10", "train_fraction": share}) for share in (0.1, 0.4))
    rows = tuple(Row(name, name) for name in ("pfedgp", "fedavg", "per-fedavg"))
    monkeypatch.setitem(ITEMS, "toy", Item("Toy", rows, columns, (Score("accuracy"),)))
    for run in runs("toy", "mini", [0]):
        folder = cell_folder(tmp_path, run.config)
        Run.create(folder, run.config)
        (folder / "summary.json").write_text(json.dumps({run.config.algorithm_name: {"accuracy": 0.5, "seconds": 1.0}}))
    text = page("toy", "mini", tmp_path)
    assert text is not None
    compute = rows_of(text, "Client compute")
    small, large = (compute.pop(f"pfedgp, {share} % for training") for share in (10, 40))
    assert [int(large[i]) / int(small[i]) for i in (0, 2)] == pytest.approx([2, 2], rel=0.05)
    assert compute == {"fedavg": ["20", "0", "160"], "per-fedavg": ["40", "1", "321"]}


def test_the_page_of_transfer_tells_what_was_run_and_names_only_that(tmp_path: Path) -> None:
    for run in runs("transfer", "mini", [7]):
        if run.column.name in ("speakers", "digits, labels"):
            folder = cell_folder(tmp_path, run.config)
            Run.create(folder, run.config)
            scores = {"nll": 0.25, "ece_pooled_debiased": 0.5, "seconds": 1.0}
            (folder / "summary.json").write_text(json.dumps({run.config.algorithm_name: scores}))
    text = page("transfer", "mini", tmp_path, first=7)
    assert text is not None
    assert "--first-seed 7 --seeds 1 --only 'speakers' --only 'digits, labels'\n" in text
    assert rows_of(text, "NLL") == {row.name: ["0.250", "0.250"] for row in ITEMS["transfer"].rows}
    assert "30 rounds at every scale" in text and "CIFAR-10" not in text
    assert "Client compute" not in text  # its columns have sizes of their own


@pytest.mark.parametrize(
    "text", ["{damaged", "[]", '{"repeats": 1, "rows": {}}', '{"local": {"nll": "low"}}', "[" * 5000]
)
def test_a_damaged_file_is_told_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "overhead.json").write_text(text)
    with pytest.raises(BadInput, match=r"overhead\.json is damaged"):
        page("overhead", "mini", tmp_path)
    run = next(iter(runs("accuracy", "mini", [0])))
    file = cell_folder(tmp_path, run.config) / "summary.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(BadInput, match=f"{file.parent.name}/summary.json is damaged"):
        page("accuracy", "mini", tmp_path)
