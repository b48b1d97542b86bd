"""A document is read back as it was written, or refused by name: whatever is in the file."""

import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lrbpfl
from lrbpfl import documents
from lrbpfl.documents import Document, read, write
from lrbpfl.errors import BadInput
from tests.personal.conftest import network

ABOUT = {"format": 1, "kind": "personal", "versions": {"lrbpfl": "0.1.0"}, "client": "Zürich / 3"}
DOCUMENT = Document(ABOUT, {"own/a": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0), "one": torch.tensor(7)})


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_document_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENT)
    write(tmp_path / "b", DOCUMENT)
    back = read(tmp_path / "a", "personal")
    assert back.about == ABOUT and back.digest == DOCUMENT.digest
    assert all(torch.equal(back.tensors[name], leaf) for name, leaf in DOCUMENT.tensors.items())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()  # nothing in it is chance


def test_the_digest_sees_names_types_shapes_and_numbers() -> None:
    leaf = DOCUMENT.tensors["own/a"]
    others = [{"own/b": leaf}, {"own/a": leaf.double()}, {"own/a": leaf.reshape(3, 2)}, {"own/a": leaf + 1}]
    digests = {Document(ABOUT, {**other}).digest for other in ({"own/a": leaf}, *others)}
    assert len(digests | {Document({**ABOUT, "client": "x"}, {"own/a": leaf}).digest}) == 6


def test_a_file_is_for_its_owner_alone(umask: None, tmp_path: Path) -> None:
    write(tmp_path / "new" / "a", DOCUMENT)
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_every_byte_counts(saved: Path, tmp_path: Path) -> None:
    """Wherever a real file is cut or changed, it is refused; a changed client file never loads as a model."""
    whole, file = saved.read_bytes(), tmp_path / "altered.safetensors"
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    places = [*range(16), *range(16, header, 19), *range(header, len(whole), max((len(whole) - header) // 60, 1))]
    for place in places:
        for altered in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            file.write_bytes(altered)
            with pytest.raises(BadInput, match=r"altered\.safetensors"):
                lrbpfl.load(file, model=network())
    file.write_bytes(whole + b"\0")
    with pytest.raises(BadInput, match=r"altered\.safetensors"):
        lrbpfl.load(file, model=network())


def raw(header: bytes, size: int | None = None, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + body


def entry(dtype: str, shape: list[Any], offsets: list[Any]) -> bytes:
    return raw(json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode(), body=b"\0" * 16)


ABSURD = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": raw(b""),
    "longest header": raw(b"{}", 2**64 - 1),
    "signed header": raw(b"{}", 2**63),
    "gigabytes of header": raw(b"{}", 10**10),
    "header beyond the end": raw(b"{}", 3),
    "no JSON": raw(b"\xff\xfe{}"),
    "a list": raw(b"[]"),
    "nothing inside": raw(b"{}"),
    "deep nesting": raw(b"[" * 50_000),
    "deep metadata": raw(json.dumps({"__metadata__": {"lrbpfl": "[" * 50_000}}).encode()),
    "metadata of numbers": raw(b'{"__metadata__": {"lrbpfl": 3}}'),
    "metadata of a list": raw(b'{"__metadata__": []}'),
    "negative offsets": entry("F32", [4], [-16, 0]),
    "crossed offsets": entry("F32", [4], [16, 0]),
    "beyond the end": entry("F32", [2**40], [0, 2**42]),
    "huge and empty": entry("F32", [2**62, 2**62], [0, 16]),
    "unknown type": entry("F1024", [4], [0, 16]),
    "complex": entry("C64", [2], [0, 16]),
    "of four bits": entry("F4", [32], [0, 16]),
    "a shape of text": entry("F32", ["4"], [0, 16]),
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "absurd").write_bytes(ABSURD[name])
    with pytest.raises(BadInput, match="absurd"):
        read(tmp_path / "absurd", "personal")


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["format", "kind", "versions", "about", "digest", "client"]),
        st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5),
    )
)
def test_a_description_without_its_digest_is_refused(said: dict[str, Any]) -> None:
    """Neither no digest, nor null beside a description that has none (NaN), lets a file in."""
    with pytest.raises(BadInput):
        _read_said({"about": {**ABOUT, **said}, "digest": None})
    with pytest.raises(BadInput):
        _read_said({"about": {**ABOUT, "client": float("nan")}, "digest": said.get("digest")})


def _read_said(said: dict[str, Any]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(raw(json.dumps({"__metadata__": {"lrbpfl": json.dumps(said)}}).encode()))
        file.flush()
        documents.read(Path(file.name), "personal")


def test_other_kinds_and_formats_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write(file, Document({**ABOUT, "format": 2, "versions": {"lrbpfl": "9.1"}}, {}))
    with pytest.raises(BadInput, match=r"a\.safetensors has format 2 \(lrbpfl 9\.1 wrote it\).*reads format 1"):
        read(file, "personal")
    write(file, DOCUMENT)
    with pytest.raises(BadInput, match="'personal' document, and a 'shared' one is needed"):
        read(file, "shared")
    write(file, Document(ABOUT, {"a": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(BadInput, match="a is of type"):
        read(file, "personal")
    with pytest.raises(BadInput, match="there is no file"):
        read(tmp_path, "personal")


def test_where_nothing_can_be_written_a_sentence_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        write(tmp_path / "file" / "below", DOCUMENT)
