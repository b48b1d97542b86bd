"""Any data of your own, in memory or on disk, as one dataset of clients."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lrbpfl.data import arrays, table_files, tables
from lrbpfl.data.clients import Integers, Part, assemble
from lrbpfl.data.datasets import Dataset
from lrbpfl.data.folder import client_files, load_folder, read_client
from lrbpfl.data.images import load_images, picture_files
from lrbpfl.disk import usable
from lrbpfl.errors import BadInput

KINDS = (
    "a .csv or .parquet file with a client column, or a folder of client-name.npz, client-name.csv or "
    "client-name.parquet files, or of images client/class/name.png"
)


def read_clients(
    source: Any, *, client: str | None = None, label: str | None = None, integers: Integers = "numbers"
) -> Dataset:
    """Everybody's examples, from any of these sources; clients come in the natural order of their names.

    - a mapping from client names to pairs (x, y) of arrays, tensors or lists, to map-style PyTorch datasets of pairs,
      or to tables;
    - one table, of pandas, polars, Arrow or Hugging Face datasets, in which the column ``client`` says whose a row is;
    - the path of such a table (.csv, .parquet), of a folder with a file for each client (.npz, .csv, .parquet), or of
      a folder of images ``client/class/name.png``.

    ``client`` and ``label`` name columns of tables, by default "client" and "label"; all other columns are features.
    Labels are whole numbers or text: those of all clients together, sorted, are the classes, kept in ``classes``.
    Inputs become float32, but for uint8 images (n, height, width) or (n, channels, height, width), which stay as they
    are, and integers that are said to be ``"tokens"``, which become int64.
    """
    if integers not in ("numbers", "tokens"):
        raise BadInput(f"integers is {integers!r}, and must be 'numbers' or 'tokens'")
    if isinstance(source, str | PathLike):
        return read_path(usable(source, home=True), client=client, label=label, integers=integers)
    if type(source).__name__ in ("DatasetDict", "IterableDatasetDict"):
        raise BadInput(f"these are the splits {', '.join(source)}, and no clients: give one of them")
    if isinstance(source, Mapping):
        return _from_mapping(source, client, label, integers)
    if table_files.is_frame(source):
        table = table_files.frame_table(source, "the table", label or tables.LABEL)
        return tables.by_client(table, client=client, label=label, integers=integers)
    raise BadInput(
        f"clients cannot be read from {type(source).__name__}: give a mapping from names to (x, y), a table, or {KINDS}"
    )


def _from_mapping(source: Mapping[Any, Any], client: str | None, label: str | None, integers: Integers) -> Dataset:
    """Clients by name, each with arrays, a dataset or a table; tables only beside tables."""
    names = _names(source)
    framed = [name for name, own in names.items() if table_files.is_frame(own)]
    if framed and len(framed) == len(names):
        frames = {
            name: table_files.frame_table(own, f"the table of client {name!r}", label or tables.LABEL)
            for name, own in names.items()
        }
        return tables.of_clients("clients", frames, client=client, label=label, integers=integers)
    if framed:
        other = next(name for name in names if name not in framed)
        raise BadInput(f"client {framed[0]!r} has a table, and client {other!r} has none: all must be alike")
    if client or label:
        raise BadInput(f"{client or label!r} names a column, and these clients have no tables")
    return assemble("clients", [part_of(name, own) for name, own in names.items()], integers=integers)


def _names(source: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, own in source.items():
        name = str(key).strip()
        if not name or name in found:
            fault = f"two clients are called {name!r}" if name else "a client has an empty name"
            raise BadInput(f"{fault}: every client needs a name of its own")
        found[name] = own
    return found


def part_of(name: str, own: Any) -> Part:
    """One client's pair (x, y), or dataset of such pairs."""
    if isinstance(own, tuple | list) and len(own) == 2:
        return arrays.from_pair(name, *own)
    other = isinstance(own, str | bytes | tuple | list | Mapping) or hasattr(own, "shape")
    if hasattr(own, "__getitem__") and hasattr(own, "__len__") and not other:
        return arrays.from_dataset(name, own)
    what = f"client {name!r} has {type(own).__name__}"
    raise BadInput(f"{what}, and needs a pair (x, y), a PyTorch dataset of such pairs, or a table")


def read_path(
    path: Path, *, client: str | None = None, label: str | None = None, integers: Integers = "numbers"
) -> Dataset:
    """The clients in a file or a folder."""
    text = (client or tables.CLIENT, label or tables.LABEL)
    if path.is_file() and path.suffix.lower() in table_files.SUFFIXES:
        table = table_files.read_table(path, text)
        return tables.by_client(table, client=client, label=label, integers=integers)
    if not path.is_dir():
        what = "is of no known kind" if path.exists() else "is not there"
        raise BadInput(f"{path} {what}: give {KINDS}")
    kinds = {suffix: client_files(path, suffix) for suffix in (".npz", *table_files.SUFFIXES)}
    found = [suffix for suffix, files in kinds.items() if files]
    depths = {len(file.relative_to(path).parts) for file in picture_files(path)}
    if 3 in depths or (depths and not found):  # a picture that merely lies beside the clients' files is none of theirs
        found.append("image")
    if not found:
        raise BadInput(f"{path} holds no client-name.npz and nothing else that could be read: give {KINDS}")
    if len(found) > 1:
        raise BadInput(f"{path} holds {' and '.join(found)} files: keep the clients' files of one kind there")
    if found[0] in table_files.SUFFIXES:
        own = {file.stem: table_files.read_table(file, text) for file in kinds[found[0]]}
        return tables.of_clients(path.resolve().name, own, client=client, label=label, integers=integers)
    if client or label:
        raise BadInput(f"{client or label!r} names a column, and {path} holds no tables but {found[0]} files")
    return load_images(path) if found[0] == "image" else load_folder(path, integers=integers)


def read_place(
    path: Path, name: str, *, client: str | None = None, label: str | None = None, integers: Integers = "numbers"
) -> Dataset:
    """The clients in a file or folder, or one of that name where a file does not tell clients apart."""
    kind = path.suffix.lower() if path.is_file() else ""
    if kind == ".npz":
        return assemble(path.name, [read_client(path)._replace(name=name)], integers=integers)
    if kind in table_files.SUFFIXES and client is None:
        table = table_files.read_table(path, (tables.CLIENT, label or tables.LABEL))
        if tables.CLIENT not in table.columns:
            return tables.of_clients(table.name, {name: table}, client=None, label=label, integers=integers)
    return read_path(path, client=client, label=label, integers=integers)
