"""One safetensors file with a checked description: nothing is trusted that a file says of itself.

The description is JSON in the file's metadata. A digest over the description and every tensor's name, type, shape and
bytes stands beside it: a file that was cut short or altered is refused by name. No pickle is read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lrbpfl import trees
from lrbpfl.disk import write_file
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree

FORMAT = 1
DTYPES = (torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)


class Digest:
    """A hash of a description and of tensors, which come one after the other by their names."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._hash = hashlib.sha256(json.dumps(about, sort_keys=True, allow_nan=False).encode())

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], data: Iterable[bytes]) -> None:
        """One more tensor, its numbers in pieces."""
        self._hash.update(json.dumps([name, str(dtype), list(shape)]).encode())
        for part in data:
            self._hash.update(part)

    def hexdigest(self) -> str:
        """Of all so far."""
        return self._hash.hexdigest()


class Document(NamedTuple):
    """What a file holds: a description of plain JSON values, and tensors by name."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """A hash of all of it (hex): equal digests, equal content."""
        found = Digest(self.about)
        for name, leaf in sorted(self.tensors.items()):
            found.add(name, leaf.dtype, leaf.shape, [trees.raw(leaf)])
        return found.hexdigest()


def write(path: Path, document: Document, *, durable: bool = True) -> None:
    """Write a document for its owner's eyes alone; the file is whole or not there."""
    # Copies, because a file takes no two tensors in one place of memory.
    copies = {
        name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, leaf in document.tensors.items()
    }
    # One key: with several, their order in the file would be chance.
    metadata = {"lrbpfl": json.dumps({"about": document.about, "digest": document.digest}, allow_nan=False)}
    write_file(path, save(copies, metadata=metadata), private=True, durable=durable)


def read(path: Path, kind: str) -> Document:
    """The document of this kind in a file; refused by name if it is not whole, not ours or of another format."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, because a file's tensors lie anywhere in memory, and where they lie can decide the last bit.
            tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} cannot be read: {_short(error)}") from None
    about, digest = _description(path, metadata)
    document = Document(about, tensors)
    _check(path, document, kind)
    if not isinstance(digest, str) or digest != _digest(document):
        raise BadInput(f"{path} was altered or damaged: its content does not fit its checksum")
    return document


def tree(path: Path, document: Document, like: Tree, *, infinite: bool = False) -> Tree:
    """The document's tensors in the form of another tree; refused by the file's name if they do not fit it."""
    try:
        found = trees.rebuild(like, document.tensors)
    except KeyError as error:
        raise BadInput(f"{path} cannot be used: it holds no tensor {error}") from None
    fault = trees.fault(found, like, infinite=infinite)
    if fault or len(document.tensors) != len(trees.leaves(like)):
        raise BadInput(f"{path} cannot be used: {fault or 'it holds more tensors than it should'}")
    return found


def named(about: Mapping[str, Any], key: str, kind: type | tuple[type, ...], path: str) -> Any:
    """The value of a key of a description, of the type that is expected there."""
    value = about.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadInput(f"{path} cannot be used: its description has no proper {key!r}")
    return value


def _description(path: Path, metadata: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """What the file says of itself, and the digest it was written with."""
    if "lrbpfl" not in metadata:
        raise BadInput(f"{path} is a safetensors file, but not one of lrbpfl's")
    try:
        said = json.loads(metadata["lrbpfl"])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("about"), dict):
        raise BadInput(f"{path} cannot be used: its description is not a JSON object")
    return said["about"], said.get("digest")


def _check(path: Path, document: Document, kind: str) -> None:
    about = document.about
    if about.get("format") != FORMAT:
        made = about.get("versions", {}).get("lrbpfl", "?") if isinstance(about.get("versions"), dict) else "?"
        found = str(about.get("format"))[:20]
        raise BadInput(
            f"{path} has format {found} (lrbpfl {str(made)[:20]} wrote it), and this version reads format {FORMAT}"
        )
    if about.get("kind") != kind:
        raise BadInput(f"{path} holds a {str(about.get('kind'))[:20]!r} document, and a {kind!r} one is needed")
    for name, leaf in document.tensors.items():
        if leaf.dtype not in DTYPES:
            raise BadInput(f"{path} cannot be used: {name[:80]} is of type {leaf.dtype}")


def _digest(document: Document) -> str | None:
    try:
        return document.digest
    except (ValueError, RecursionError):  # a description that we would not have written
        return None


def _short(error: BaseException) -> str:
    """What went wrong, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
