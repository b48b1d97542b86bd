"""A client's model as a file for other programs: ONNX, or torch's own format. Nothing is written that was not tried.

The file is made in memory, opened again and asked about random inputs in batches of two sizes; where it does not say
what the client's model says, it is refused.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lrbpfl import trees
from lrbpfl.disk import write_file
from lrbpfl.engines.work import one_thread
from lrbpfl.errors import BadInput
from lrbpfl.personal.ensemble import OUTPUTS, Frozen
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.pack import versions
from lrbpfl.personal.signature import example
from lrbpfl.rng import generator

TOLERANCE = 1e-5  # of probabilities and uncertainties
BATCHES = (1, 5)  # rows that a file is tried on; it is traced with a third number
LARGEST = 2**31 - 2**20  # bytes that one ONNX file can hold, with some room for its names

Answer = Callable[[Any], dict[str, np.ndarray[Any, Any]]]  # what a file says of inputs, by the names of outputs


class Exported(NamedTuple):
    """A file that was written."""

    path: Path
    size: int  # bytes
    difference: float | None  # the largest from the client's own predictions; None: there was nothing to try it with


def to_onnx(personal: PersonalModel, path: str | Path) -> Exported:
    """Write one ONNX file with named inputs and outputs, and any number of rows."""
    _need("onnx", "onnxscript")
    names = input_names(personal.inputs)
    traced = _traced(personal)
    with _quiet(), _refusing("ONNX"):
        program: Any = torch.onnx.export(
            traced, dynamo=True, verbose=False, input_names=names, output_names=list(OUTPUTS)
        )
        proto = program.model_proto
        if proto.ByteSize() > LARGEST:
            raise BadInput(f"a model of {proto.ByteSize()} bytes is too large for one ONNX file: export a .pt2 instead")
    _tidied(proto)
    for key, value in told(personal).items():
        proto.metadata_props.add(key=f"lrbpfl.{key}", value=value)
    data = proto.SerializeToString()
    found = difference(personal, _onnx_runtime(data, names)) if find_spec("onnxruntime") else None
    return _written(Path(path), data, found)


def to_pt2(personal: PersonalModel, path: str | Path) -> Exported:
    """Write one file for `torch.export.load`, with any number of rows."""
    with _quiet(), _refusing("torch's format"):
        made = io.BytesIO()
        torch.export.save(_traced(personal), made, extra_files={"lrbpfl.json": json.dumps(told(personal))})
        opened = torch.export.load(io.BytesIO(made.getvalue())).module()
    return _written(Path(path), made.getvalue(), difference(personal, _called(opened)))


def told(personal: PersonalModel) -> dict[str, str]:
    """What a file says of where it comes from."""
    about = personal.about
    return {
        "client": personal.client,
        "classes": json.dumps(list(personal.classes)),
        "algorithm": str(about["algorithm"]["name"]),
        "digest": personal._own.digest,
        "shared_digest": about.get("shared") or "",
        "trained_with": json.dumps(about.get("versions", {})),
        "exported_with": json.dumps(versions()),
    }


def input_names(described: Any) -> list[str]:
    """The names of the inputs: their own, input_0, input_1, ..., or input if there is one."""
    if "named" in described:
        return list(described["named"])
    return [f"input_{i}" for i in range(len(described["several"]))] if "several" in described else ["input"]


def difference(personal: PersonalModel, answer: Answer) -> float:
    """The largest difference of an answer from the client's own predictions, on random inputs; refused if too large."""
    largest = 0.0
    for rows in BATCHES:
        x = _rows(personal, rows)
        expected, got = personal.predict(x), answer(x)
        apart = [np.abs(getattr(expected, name) - got[name]).max() for name in OUTPUTS]
        largest = max([largest, *map(float, apart)], key=lambda d: np.inf if np.isnan(d) else d)
    if not largest <= TOLERANCE:
        raise BadInput(
            f"the exported model would differ from the client's by up to {largest:.1e}, and {TOLERANCE:.0e} is allowed"
        )
    return largest


def _rows(personal: PersonalModel, rows: int) -> Any:
    """Random inputs, the same each time: normal numbers, bytes, or whole numbers that any vocabulary has, 0 and 1."""
    rng = generator(0, "export", rows)
    scaling = personal.scaling

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            normal = torch.randn(leaf.shape, generator=rng, dtype=leaf.dtype)
            return normal * scaling.std + scaling.mean if scaling else normal
        highest = 256 if leaf.dtype == torch.uint8 else 2
        return torch.randint(highest, leaf.shape, generator=rng).to(leaf.dtype)

    return trees.tree_map(fill, example(personal.inputs, rows))


def _traced(personal: PersonalModel) -> ExportedProgram:
    """The frozen model as a graph, for any number of rows."""
    args = _arguments(_rows(personal, 3))
    batch = Dim("batch")
    shapes = {"args": trees.tree_map(lambda leaf: {0: batch}, args)}
    with _quiet(), _refusing("a graph"):
        program = torch.export.export(Frozen(personal).eval(), args, dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # where files lie here is nobody's business
    return program


def _onnx_runtime(data: bytes, names: list[str]) -> Answer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def answer(x: Any) -> dict[str, np.ndarray[Any, Any]]:
        feed = dict(zip(names, (leaf.numpy() for leaf in trees.leaves(x)), strict=True))
        return dict(zip(OUTPUTS, session.run(list(OUTPUTS), feed), strict=True))

    return answer


def _called(module: nn.Module) -> Answer:
    def answer(x: Any) -> dict[str, np.ndarray[Any, Any]]:
        with torch.no_grad(), one_thread():
            return {name: part.numpy() for name, part in module(*_arguments(x)).items()}

    return answer


def _arguments(x: Any) -> tuple[Any, ...]:
    """Inputs as the arguments of a frozen model."""
    return x if isinstance(x, tuple) else (x,)


def _tidied(proto: Any) -> None:
    """Name the number of rows, and take out what torch notes beside every part: lines and folders of its makers."""
    graph = proto.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph):
        del part.metadata_props[:]
    (rows,) = {value.type.tensor_type.shape.dim[0].dim_param for value in graph.input}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == rows:
                dim.dim_param = "batch"


def _written(path: Path, data: bytes, found: float | None) -> Exported:
    try:
        write_file(path, data, private=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None
    return Exported(path, len(data), found)


def _need(*packages: str) -> None:
    missing = [name for name in packages if not find_spec(name)]
    if missing:
        raise BadInput(f"this export needs {' and '.join(missing)}: pip install 'lrbpfl[export]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says to its own developers."""
    loud = logging.getLogger("torch.onnx")
    before = loud.level
    loud.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        loud.setLevel(before)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """A model that torch cannot trace is told in a sentence."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # of many kinds, most of them torch's own
        reason = " ".join(str(error).split())[:300]
        raise BadInput(f"the model cannot be written in {what}: {type(error).__name__}: {reason}") from None
