"""Whatever holds them, the same examples make the same dataset; what cannot be right is refused by name."""

from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import TensorDataset

from lrbpfl.data import Dataset, load, read_clients, table_files
from lrbpfl.data.order import natural_order
from lrbpfl.errors import BadInput

NAMES = ("site-2", "site-10")
X = {"site-2": np.array([[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]]), "site-10": np.array([[7.0, 8.0], [9.0, -1.0]])}
Y = {"site-2": np.array([300, 0, 100]), "site-10": np.array([0, 100])}
FRAME = pd.DataFrame(
    {
        "ward": ["site-10", "site-2", "site-2", "site-10", "site-2"],
        "age": [7.0, 1.5, 3.0, 9.0, 5.0],
        "bmi": [8, 2, 4, -1, 6],
        "outcome": [0, 300, 0, 100, 100],
    }
)
COLUMNS: dict[str, Any] = {"client": "ward", "label": "outcome"}


def same(dataset: Dataset) -> None:
    """Two clients, the second one called site-10, and three classes."""
    assert dataset.client_names == NAMES
    assert dataset.x.dtype == torch.float32 and np.array_equal(dataset.x.numpy(), np.concatenate([*X.values()]))
    assert dataset.y.tolist() == [2, 0, 1, 0, 1] and dataset.y.dtype == torch.int64
    assert (dataset.num_classes, dataset.classes, dataset.class_names) == (3, (0, 100, 300), ("0", "100", "300"))
    assert dataset.owner is not None and dataset.owner.tolist() == [0, 0, 0, 1, 1]


def test_mappings_of_arrays_tensors_lists_and_datasets() -> None:
    tensors = {name: (torch.from_numpy(X[name]), torch.from_numpy(Y[name])) for name in reversed(NAMES)}
    same(read_clients({name: (X[name], Y[name]) for name in reversed(NAMES)}))
    same(read_clients(tensors))
    same(read_clients({name: (x.bfloat16().requires_grad_(), y.double()) for name, (x, y) in tensors.items()}))
    same(read_clients({name: [X[name].tolist(), Y[name].tolist()] for name in NAMES}))
    same(read_clients({name: TensorDataset(*tensors[name]) for name in NAMES}))


def test_tables_of_three_libraries() -> None:
    same(read_clients(FRAME, **COLUMNS))
    same(read_clients(FRAME.convert_dtypes(), **COLUMNS))
    same(read_clients(pa.Table.from_pandas(FRAME), **COLUMNS))
    same(read_clients(hf.Dataset.from_pandas(FRAME), **COLUMNS))
    assert read_clients(FRAME, **COLUMNS).feature_names == ("age", "bmi")


def test_tables_by_client_with_and_without_the_client_column() -> None:
    groups = dict(list(FRAME.groupby("ward")))
    same(read_clients(groups, **COLUMNS))
    same(read_clients({name: group.drop(columns="ward") for name, group in groups.items()}, label="outcome"))
    turned = {name: group[group.columns[:: 1 if name == "site-2" else -1]] for name, group in groups.items()}
    same(read_clients(turned, **COLUMNS))  # columns go by their names, not by their places
    with pytest.raises(BadInput, match=r"table of client 'a' has the name 'site-10' in its column 'ward'"):
        read_clients({"a": FRAME, "b": FRAME}, **COLUMNS)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv(tmp_path: Path, separator: str) -> None:
    FRAME.to_csv(tmp_path / "all.csv", sep=separator, index=False)
    same(load(str(tmp_path / "all.csv"), **COLUMNS))


def test_csv_says_true_and_false(tmp_path: Path) -> None:
    FRAME.assign(male=[True, False, True, False, False]).to_csv(tmp_path / "all.csv", index=False)
    dataset = load(str(tmp_path / "all.csv"), **COLUMNS)
    assert dataset.feature_names == ("age", "bmi", "male") and dataset.x[:, 2].tolist() == [0, 1, 0, 1, 0]


def test_csv_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "AT_ONCE", 2)
    FRAME.to_csv(tmp_path / "all.csv", index=False)
    same(load(str(tmp_path / "all.csv"), **COLUMNS))
    text = (tmp_path / "all.csv").read_text().replace("-1,", "?,")
    (tmp_path / "all.csv").write_text(text)
    with pytest.raises(BadInput, match=r"line 5 \(client 'site-10'\), column 'bmi', holds '\?'"):
        load(str(tmp_path / "all.csv"), **COLUMNS)


def test_parquet_without_the_index_of_a_frame(tmp_path: Path) -> None:
    FRAME.set_index(pd.Index([5, 3, 9, 1, 0])).to_parquet(tmp_path / "all.parquet")
    same(read_clients(tmp_path / "all.parquet", **COLUMNS))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_folder_of_tables(tmp_path: Path, kind: str) -> None:
    for name, group in FRAME.groupby("ward"):
        own = group.drop(columns="ward").reset_index(drop=True)
        getattr(own, f"to_{kind}")(tmp_path / f"{name}.{kind}", index=False)
    same(load(str(tmp_path), label="outcome"))


def test_text_labels_are_class_names_in_natural_order(tmp_path: Path) -> None:
    grades = ["grade 10", "grade 2", "grade 2", "grade 10", "none"]
    FRAME.assign(outcome=grades).to_csv(tmp_path / "all.csv", index=False)
    for dataset in (read_clients(FRAME.assign(outcome=grades), **COLUMNS), load(str(tmp_path / "all.csv"), **COLUMNS)):
        assert dataset.classes == dataset.class_names == ("grade 2", "grade 10", "none")
        assert dataset.y.tolist() == [0, 0, 2, 1, 1]
    FRAME.assign(outcome=["007", "7", "7", "007", "7"]).to_csv(tmp_path / "all.csv", index=False)
    assert load(str(tmp_path / "all.csv"), **COLUMNS).classes == ("007", "7")  # codes are names


def test_what_stays_an_integer() -> None:
    images, words = np.full((2, 4, 4), 200, np.uint8), np.array([[3, 70_000], [5, 6]])
    assert read_clients({"a": (images, [0, 1])}).x.dtype == torch.uint8
    assert read_clients({"a": (images.reshape(2, 16), [0, 1])}).x.dtype == torch.float32
    assert read_clients({"a": (words, [0, 1])}).x.dtype == torch.float32
    tokens = read_clients({"a": (words, [0, 1])}, integers="tokens").x
    assert tokens.dtype == torch.int64 and tokens.tolist() == words.tolist()


def test_hugging_face_images_arrays_and_class_names() -> None:
    pixels = np.random.default_rng(0).integers(256, size=(4, 6, 5, 3), dtype=np.uint8)
    features = hf.Features(
        {"client": hf.Value("string"), "image": hf.Image(), "label": hf.ClassLabel(names=["no", "maybe", "yes"])}
    )
    rows = {"client": [*"aabb"], "image": [*pixels], "label": [2, 0, 0, 2]}
    dataset = read_clients(hf.Dataset.from_dict(rows, features=features))
    assert np.array_equal(dataset.x.numpy(), pixels.transpose(0, 3, 1, 2))
    assert dataset.class_names == ("no", "maybe", "yes") and dataset.y.tolist() == [2, 0, 0, 2]
    by_client = {
        name: hf.Dataset.from_dict(rows, features=features).select(own)
        for name, own in {"a": [0, 1], "b": [2, 3]}.items()
    }
    assert read_clients(by_client).class_names == ("no", "maybe", "yes")
    vectors = hf.Dataset.from_dict({"client": [*"aabb"], "v": [[1.0, 2.0]] * 4, "label": [0, 1, 0, 1]})
    assert read_clients(vectors).x.shape == (4, 2)
    with pytest.raises(BadInput, match="splits train, test"):
        read_clients(hf.DatasetDict(train=vectors, test=vectors))


PAIR = (np.zeros((3, 2)), [0, 1, 1])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"a": PAIR, "b": (np.zeros((3, 4)), [0, 1, 1])}, r"client 'b' has inputs \(4,\) float32 where client 'a'"),
        ({"a": PAIR, "b": ([[0, 1], [2, np.inf]], [0, 1])}, "row 1 of client 'b', feature 1, holds inf"),
        ({"a": PAIR, "b": ([[0, 1], [1e39, 0]], [0, 1])}, "row 1 .*'b', feature 0, holds 1e.39, .* float32"),
        ({"a": PAIR, "b": ([[0, 1], [2]], [0, 1])}, "client 'b' has inputs that do not make one array"),
        ({"a": PAIR, "b": ([[0, "x"], [2, 1]], [0, 1])}, "row 0 of client 'b' holds 'x', which is not a number"),
        ({"a": PAIR, "b": ([[0, None], [2, 1]], [0, 1])}, "row 0 of client 'b' is empty"),
        ({"a": PAIR, "b": ([[0, 1]], [0])}, "client 'b' has one example only"),
        ({"a": PAIR, "b": (np.zeros((0, 2)), [])}, "client 'b' has x of shape .* empty"),
        ({"a": PAIR, "b": (np.zeros(3), [0, 1, 1])}, r"client 'b' has x of shape \(3,\).*x\[:, None\]"),
        ({"a": PAIR, "b": (np.zeros((3, 2)), [0, 1])}, r"client 'b' has x of shape \(3, 2\) and y of shape \(2,\)"),
        ({"a": PAIR, "b": (np.zeros((2, 2)), [0.5, 1])}, "client 'b' has the label 0.5 in row 0"),
        ({"a": PAIR, "b": (np.zeros((2, 2)), ["x", ""])}, "client 'b' has no label in row 1"),
        ({"a": PAIR, "b": (np.zeros((2, 2)), ["x", 1])}, "client 'b' has the label 'x' in row 0 and 1 in row 1"),
        ({"a": PAIR, "b": np.zeros((2, 2))}, "client 'b' has ndarray, and needs a pair"),
        ({"a": PAIR, "b": FRAME}, "client 'b' has a table, and client 'a' has none"),
        ({1: PAIR, "1": PAIR}, "two clients are called '1'"),
        ({}, "no clients"),
        (42, "clients cannot be read from int"),
    ],
)
def test_a_bad_client_is_named(source: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as refusal:
        read_clients(source)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("column", "row", "cell", "words"),
    [
        ("age", 2, "n/a", r"line 4 \(client 'site-2'\), column 'age', holds 'n/a'"),
        ("age", 1, "", r"line 3 \(client 'site-2'\), column 'age', is empty"),
        ("bmi", 0, "inf", r"line 2 \(client 'site-10'\), column 'bmi', holds inf"),
        ("bmi", 3, "nan", r"line 5 \(client 'site-10'\), column 'bmi', is empty or NaN"),
        ("bmi", 3, "-1e39", r"line 5 .*column 'bmi', holds -1e.39"),
        ("ward", 4, " ", "line 6, column 'ward', names no client"),
        ("ward", 4, "site-3", "client 'site-3' has one example only"),
        ("outcome", 1, "", r"line 3 \(client 'site-2'\), column 'outcome', is empty"),
        ("outcome", 1, "0.7", r"line 3 \(client 'site-2'\), column 'outcome', holds '0.7'"),
        ("age", 0, "1,2", "line 2 has 5 cells where the first has 4"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, column: str, row: int, cell: str, words: str) -> None:
    cells = [[str(value) for value in line] for line in FRAME.itertuples(index=False)]
    cells[row][list(FRAME.columns).index(column)] = cell
    lines = [",".join(FRAME.columns), *map(",".join, cells)]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInput, match=words):
        load(str(tmp_path / "all.csv"), **COLUMNS)


def test_a_missing_value_in_a_frame_is_named() -> None:
    for holed in (FRAME.astype({"bmi": float}), FRAME.convert_dtypes(), FRAME.astype({"bmi": object})):
        holed.loc[3, "bmi"] = None
        with pytest.raises(BadInput, match=r"row 3 \(client 'site-10'\), column 'bmi', is empty"):
            read_clients(holed, **COLUMNS)


def test_columns_that_are_not_there_or_should_not_be(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no column 'client'; its columns are 'ward', 'age', 'bmi', 'outcome'.*client="):
        read_clients(FRAME)
    with pytest.raises(BadInput, match="no column 'label'"):
        read_clients(FRAME, client="ward")
    FRAME.to_csv(tmp_path / "all.csv")  # with the index, as a column without a name
    with pytest.raises(BadInput, match=r"column without a name.*index=False"):
        load(str(tmp_path / "all.csv"), **COLUMNS)
    with pytest.raises(BadInput, match="both the client and the label"):
        read_clients(FRAME, client="ward", label="ward")
    with pytest.raises(BadInput, match="'ward' names a column, and the dataset 'digits' is no table"):
        load("digits", client="ward")
    different = {"a": FRAME.drop(columns="ward"), "b": FRAME.drop(columns=["ward", "bmi"])}
    with pytest.raises(BadInput, match="client 'a' has a column 'bmi', and client 'b' has none"):
        read_clients(different, label="outcome")


def test_folders_that_hold_nothing_or_two_kinds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(BadInput, match="nothing else that could be read"):
        load(str(tmp_path))
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    np.savez(tmp_path / "b.npz", x=X["site-2"], y=Y["site-2"])
    with pytest.raises(BadInput, match=r"holds \.npz and \.csv files"):
        load(str(tmp_path))


def test_an_extra_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FRAME.to_parquet(tmp_path / "all.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"all\.parquet needs pyarrow.*lrbpfl\[parquet\]"):
        load(str(tmp_path / "all.parquet"), **COLUMNS)


def test_names_of_thousands_of_digits_are_in_order() -> None:
    long = "9" * 5000
    assert natural_order(["b", long, "10", "0010", "9", "a2", "a10"]) == ["9", "0010", "10", long, "a2", "a10", "b"]
