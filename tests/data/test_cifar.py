"""The CIFAR reader on small files of the official layout, and the download on a server that cuts the line."""

import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lrbpfl.data import load
from lrbpfl.data.cifar import CIFAR10, CIFAR100, Archive, File, read
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

IMAGES = 40  # in each file; random bytes do not compress, so the archive is several chunks long


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tiny(label_bytes: int = 1, url: str = "http://127.0.0.1:9/tiny.tar.gz") -> tuple[Archive, dict[str, bytes]]:
    """An archive record and its files: two files of random images, labels below ten."""
    rng = numpy_generator(label_bytes)
    contents = {}
    for name in ("first.bin", "second.bin"):
        rows = rng.integers(256, size=(IMAGES, label_bytes + 3072), dtype=np.uint8)
        rows[:, :label_bytes] %= 10
        contents[name] = rows.tobytes()
    files = tuple(File(name, len(content), digest(content)) for name, content in contents.items())
    return Archive(url, 0, "", "tiny-bin", files, label_bytes, 10, "names.txt"), contents


def write(archive: Archive, contents: dict[str, bytes], root: Path) -> None:
    (root / archive.folder).mkdir(parents=True)
    for name, content in contents.items():
        (root / archive.folder / name).write_bytes(content)


def pack(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one body; ``cuts`` says after how many bytes to drop each of the first connections."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = b""
        self.cuts: list[int] = []
        self.ranged = True
        self.status = 0
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/tiny.tar.gz"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranged else 0
        body = self.server.body[start:]
        self.send_response(self.server.status or (206 if self.server.ranged else 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def offered(server: Server, extra: dict[str, bytes] | None = None) -> tuple[Archive, dict[str, bytes]]:
    """The tiny archive, packed and on offer."""
    archive, contents = tiny(url=server.url)
    server.body = pack({f"{archive.folder}/{name}": content for name, content in contents.items()} | (extra or {}))
    return archive._replace(size=len(server.body), sha256=digest(server.body)), contents


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_reads_images_and_the_last_label_byte(tmp_path: Path, label_bytes: int) -> None:
    archive, contents = tiny(label_bytes)
    write(archive, contents, tmp_path)
    x, y = read(archive, tmp_path)
    assert x.shape == (2 * IMAGES, 3, 32, 32) and x.dtype == torch.uint8
    assert y.shape == (2 * IMAGES,) and y.dtype == torch.int64
    record = label_bytes + 3072
    for index in (0, IMAGES - 1, IMAGES, 2 * IMAGES - 1):
        row = contents["first.bin" if index < IMAGES else "second.bin"][record * (index % IMAGES) :][:record]
        assert int(y[index]) == row[label_bytes - 1]
        assert bytes(x[index].flatten().tolist()) == row[label_bytes:]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    archive, contents = tiny()
    write(archive, contents | {"second.bin": contents["second.bin"][:1000]}, tmp_path)
    size = IMAGES * 3073
    with pytest.raises(BadInput, match=f"second.bin has 1000 bytes and the official file has {size}: delete it"):
        read(archive, tmp_path)


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    archive, contents = tiny()
    spoilt = bytearray(contents["first.bin"])
    spoilt[5000] ^= 1
    write(archive, contents | {"first.bin": bytes(spoilt)}, tmp_path)
    with pytest.raises(BadInput, match=r"first.bin is damaged, its checksum differs.*delete it"):
        read(archive, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    archive, contents = tiny()
    write(archive, {"first.bin": contents["first.bin"]}, tmp_path)
    with pytest.raises(BadInput, match=r"lacks second.bin.*LRBPFL_DATA"):
        read(archive, tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    archive, _ = tiny()
    for file in archive.files:
        (tmp_path / archive.folder / file.name).mkdir(parents=True)
    size = (tmp_path / archive.folder / "first.bin").stat().st_size
    with pytest.raises(BadInput, match=r"first\.bin cannot be read"):
        read(archive._replace(files=(archive.files[0]._replace(size=size),)), tmp_path)


@pytest.mark.parametrize("progress", [True, False])
def test_downloads_and_unpacks(tmp_path: Path, server: Server, progress: bool) -> None:
    extra = {"../evil.bin": b"evil", "tiny-bin/notes.txt": b"notes", "tiny-bin/names.txt": b"names"}
    archive, contents = offered(server, extra=extra)
    root = tmp_path / "not" / "yet"
    x, _ = read(archive, root, progress=progress)
    assert len(x) == 2 * IMAGES
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == {
        "not/yet/tiny-bin/first.bin",
        "not/yet/tiny-bin/names.txt",
        "not/yet/tiny-bin/second.bin",
    }
    assert (root / "tiny-bin" / "first.bin").read_bytes() == contents["first.bin"]
    read(archive, root)
    assert len(server.asked) == 1


def test_a_cut_download_continues(tmp_path: Path, server: Server) -> None:
    archive, contents = offered(server)
    server.cuts = [len(server.body) // 2]
    with pytest.raises(
        BadInput, match=rf"cannot download .* of {archive.size} bytes are kept.*{server.url}.*LRBPFL_DATA"
    ):
        read(archive, tmp_path)
    kept = (tmp_path / "tiny.tar.gz.part").read_bytes()
    assert 0 < len(kept) <= len(server.body) // 2 and server.body.startswith(kept)
    read(archive, tmp_path)
    assert server.asked == ["bytes=0-", f"bytes={len(kept)}-"]
    for name, content in contents.items():
        assert (tmp_path / archive.folder / name).read_bytes() == content
    assert not (tmp_path / "tiny.tar.gz.part").exists()


def test_a_server_without_ranges_starts_again(tmp_path: Path, server: Server) -> None:
    archive, _ = offered(server)
    server.ranged = False
    (tmp_path / "tiny.tar.gz.part").write_bytes(server.body[:70_000])
    assert len(read(archive, tmp_path)[0]) == 2 * IMAGES


@pytest.mark.parametrize("surplus", [0, 5])
def test_a_part_that_is_complete_or_too_long(tmp_path: Path, server: Server, surplus: int) -> None:
    archive, _ = offered(server)
    (tmp_path / "tiny.tar.gz.part").write_bytes(server.body + bytes(surplus))
    assert len(read(archive, tmp_path)[0]) == 2 * IMAGES
    assert server.asked == ([] if surplus == 0 else ["bytes=0-"])


def test_a_corrupt_archive_is_refused_and_forgotten(tmp_path: Path, server: Server) -> None:
    archive, _ = offered(server)
    good = server.body
    server.body = good[:-1000] + bytes(1000)
    with pytest.raises(BadInput, match=rf"tiny\.tar\.gz is damaged, its checksum differs.*{server.url}.*LRBPFL_DATA"):
        read(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.body = good
    assert len(read(archive, tmp_path)[0]) == 2 * IMAGES


def test_a_missing_page_is_told(tmp_path: Path, server: Server) -> None:
    archive, _ = offered(server)
    server.status = 404
    with pytest.raises(BadInput, match="HTTPError"):
        read(archive, tmp_path)


@pytest.mark.parametrize("body", [b"not an archive", pack({"tiny-bin/first.bin": b"half of it"})])
def test_an_archive_without_the_files_is_refused(tmp_path: Path, server: Server, body: bytes) -> None:
    archive, _ = tiny(url=server.url)
    server.body = body
    with pytest.raises(BadInput, match="cannot be unpacked"):
        read(archive._replace(size=len(body), sha256=digest(body)), tmp_path)
    assert not (tmp_path / archive.folder).exists()


def test_an_archive_put_there_by_hand_needs_no_network(tmp_path: Path, server: Server) -> None:
    archive, _ = offered(server)
    (tmp_path / "tiny.tar.gz").write_bytes(server.body)
    assert len(read(archive, tmp_path)[0]) == 2 * IMAGES
    assert server.asked == [] and (tmp_path / "tiny.tar.gz").exists()


def test_a_root_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    archive, _ = tiny()
    with pytest.raises(BadInput, match="cannot download"):
        read(archive._replace(size=9), tmp_path / "file" / "root")


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    archive, _ = tiny()  # nobody listens on the discard port
    with pytest.raises(BadInput) as refusal:
        read(archive._replace(size=9), tmp_path)
    message = str(refusal.value)
    assert all(word in message for word in (archive.url, str(tmp_path), archive.folder, "$LRBPFL_DATA"))
    assert "\n" not in message


@pytest.mark.parametrize(("name", "archive"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_the_official_files(name: str, archive: Archive) -> None:
    root = os.environ.get("LRBPFL_DATA")
    if not root or not all((Path(root) / archive.folder / file.name).exists() for file in archive.files):
        pytest.skip(f"$LRBPFL_DATA does not hold {archive.folder}")
    dataset = load(name)
    assert dataset.x.shape == (60_000, 3, 32, 32)
    assert (dataset.num_classes, dataset.num_test) == (archive.num_classes, 10_000)
    counts = torch.bincount(dataset.y[:50_000])
    assert counts.tolist() == [50_000 // archive.num_classes] * archive.num_classes
    assert torch.bincount(dataset.y).tolist() == [60_000 // archive.num_classes] * archive.num_classes
    if (Path(root) / archive.folder / archive.class_names).exists():
        ends = {"cifar10": ("airplane", "truck"), "cifar100": ("apple", "worm")}[name]
        assert dataset.class_names and (dataset.class_names[0], dataset.class_names[-1]) == ends
