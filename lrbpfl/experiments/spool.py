"""Results on their way: rows that become one table of tensors, and evaluations that wait for the last of them."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrbpfl import documents, trees
from lrbpfl.disk import private_folder, remove_folder, whole, writing
from lrbpfl.documents import FORMAT, Digest, Document
from lrbpfl.engines.loop import Evaluation
from lrbpfl.engines.work import Evaluated
from lrbpfl.metrics import Predictions

DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.float64: "F64"}  # in the words of safetensors


class Table:
    """Columns that grow row by row on the disk, and end as one document."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self._aside = path, path.with_name(f".{path.name}.rows")
        self._about = {"format": FORMAT, "kind": kind}
        self._columns: dict[str, tuple[torch.dtype, list[int]]] = {}  # dtypes and shapes so far
        remove_folder(self._aside)

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """More rows: a tensor for each column, always the same ones."""
        with writing(self.path):
            private_folder(self._aside)
            for name, part in rows.items():
                _, shape = self._columns.setdefault(name, (part.dtype, [0, *part.shape[1:]]))
                shape[0] += len(part)
                with (self._aside / name).open("ab") as file:
                    file.write(trees.raw(part))

    def finish(self) -> None:
        """Put the columns behind one another; no file where there are no rows."""
        if not self._columns:
            return
        signed = json.dumps({"about": self._about, "digest": self._digest()})
        header: dict[str, Any] = {"__metadata__": {"lrbpfl": signed}}
        end = 0
        for name, (dtype, shape) in self._columns.items():
            size = int(np.prod(shape)) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with whole(self.path, private=True) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in self._columns:
                with (self._aside / name).open("rb") as rows:
                    shutil.copyfileobj(rows, file)
        self.drop()

    def _digest(self) -> str:
        """That of the document which the file will be, without reading all of it at once."""
        found = Digest(self._about)
        for name, (dtype, shape) in sorted(self._columns.items()):
            with (self._aside / name).open("rb") as rows:
                found.add(name, dtype, shape, iter(lambda: rows.read(2**20), b""))
        return found.hexdigest()

    def drop(self) -> None:
        """Let the rows go."""
        remove_folder(self._aside)


class Waiting:
    """Evaluations on the disk, for their owner's eyes alone, until all are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ids: list[int] = []
        remove_folder(folder)

    def add(self, evaluation: Evaluation) -> None:
        """One more; it must have a result."""
        assert evaluation.result is not None
        k, result = evaluation.client_id, evaluation.result
        tensors = {f"personal/{name}": leaf for name, leaf in result.personal.items()}
        for part in ("predictions", "calibration"):
            fields = {} if getattr(result, part) is None else getattr(result, part)._asdict()
            tensors |= {f"{part}/{name}": torch.from_numpy(column) for name, column in fields.items()}
        tensors |= {f"scaling/{i}": leaf for i, leaf in enumerate(result.scaling or ())}
        about = {"format": FORMAT, "kind": "evaluation", "shared": result.shared, "seconds": result.seconds}
        about["examples"] = result.examples
        documents.write(self.folder / str(k), Document(about, tensors), durable=False)
        self._ids.append(k)

    def drop(self) -> None:
        """Let all of them go."""
        remove_folder(self.folder)

    def __iter__(self) -> Iterator[Evaluation]:
        """All of them, in the order in which they came; the folder is gone afterwards."""
        for k in self._ids:
            document = documents.read(self.folder / str(k), "evaluation")

            def part(name: str, tensors: Mapping[str, Tensor] = document.tensors) -> dict[str, Tensor]:
                return {key.removeprefix(name): leaf for key, leaf in tensors.items() if key.startswith(name)}

            predictions, calibration = (
                Predictions(**{key: leaf.numpy() for key, leaf in found.items()}) if found else None
                for found in (part("predictions/"), part("calibration/"))
            )
            assert predictions is not None
            mean, spread = (part("scaling/").get(place) for place in "01")
            result = Evaluated(
                predictions=predictions,
                personal=part("personal/"),
                shared=document.about["shared"],
                seconds=document.about["seconds"],
                calibration=calibration,
                examples=document.about["examples"],
                scaling=None if mean is None or spread is None else (mean, spread),
            )
            yield Evaluation(k, result)
            with writing(self.folder):
                (self.folder / str(k)).unlink()
        self.drop()
