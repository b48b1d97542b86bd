"""The official binary files of CIFAR-10 and CIFAR-100 (Krizhevsky 2009), verified byte for byte.

They are read from ``root``; when none of them is there, the official archive is downloaded and unpacked, and a
download that was cut continues where it stopped.
"""

import hashlib
import shutil
import tarfile
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrbpfl.errors import BadInput

_PIXELS = (3, 32, 32)
_CHUNK = 2**16  # bytes; a cut download loses at most one chunk


class File(NamedTuple):
    """One official file; its size and checksum."""

    name: str
    size: int  # bytes
    sha256: str


class Archive(NamedTuple):
    """One official archive and the files read from it, in the order of the examples; the last holds the test images."""

    url: str
    size: int  # bytes
    sha256: str
    folder: str
    files: tuple[File, ...]
    label_bytes: int  # before each image; the last of them is the label used
    num_classes: int
    class_names: str  # a text file; reading does without it

    def count(self, file: File) -> int:
        """How many images the file holds."""
        return file.size // self.record

    @property
    def record(self) -> int:
        """Bytes of an image with its labels."""
        return self.label_bytes + int(np.prod(_PIXELS))


CIFAR10 = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    folder="cifar-10-batches-bin",
    files=(
        File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    label_bytes=1,
    num_classes=10,
    class_names="batches.meta.txt",
)

CIFAR100 = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    size=168_513_733,
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    folder="cifar-100-binary",
    files=(
        File("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        File("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    label_bytes=2,
    num_classes=100,
    class_names="fine_label_names.txt",
)


def read(archive: Archive, root: Path, *, progress: bool = False) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64, file after file."""
    folder = root / archive.folder
    missing = [file.name for file in archive.files if not (folder / file.name).exists()]
    if len(missing) == len(archive.files):
        _unpack(archive, root, progress)
    elif missing:
        raise BadInput(f"{folder} lacks {', '.join(missing)}: delete that folder and {_advice(archive, root)}")
    counts = [archive.count(file) for file in archive.files]
    x = np.empty((sum(counts), *_PIXELS), np.uint8)
    y = np.empty(sum(counts), np.int64)
    start = 0
    for file, count in zip(archive.files, counts, strict=True):
        rows = np.frombuffer(_verified(folder / file.name, file), np.uint8).reshape(count, archive.record)
        y[start : start + count] = rows[:, archive.label_bytes - 1]
        x[start : start + count] = rows[:, archive.label_bytes :].reshape(count, *_PIXELS)
        start += count
    return torch.from_numpy(x), torch.from_numpy(y)


def _advice(archive: Archive, root: Path) -> str:
    """What a reader of an error message can do."""
    return (
        f"try again, or fetch {archive.url} by other means and put it, packed or unpacked, in {root}, "
        f"or set $LRBPFL_DATA to a folder that holds {archive.folder}"
    )


def _verified(path: Path, file: File) -> bytes:
    """The bytes of an official file, or a refusal."""
    advice = "delete it and load the dataset again to fetch the official one"
    try:
        if (found := path.stat().st_size) != file.size:
            raise BadInput(f"{path} has {found} bytes and the official file has {file.size}: {advice}")
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): make it a readable file, or {advice}") from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise BadInput(f"{path} is damaged, its checksum differs from the official SHA-256 {file.sha256}: {advice}")
    return content


def _unpack(archive: Archive, root: Path, progress: bool) -> None:
    """Put the official files in place; a packed archive found in ``root`` spares the download and is kept."""
    packed = root / PurePosixPath(archive.url).name
    found = packed.exists()
    _fetch(archive, packed, progress)
    try:
        _extract(archive, packed)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise BadInput(f"{packed} cannot be unpacked ({error}): {_advice(archive, root)}") from error
    if not found:
        packed.unlink(missing_ok=True)


def _extract(archive: Archive, packed: Path) -> None:
    """Take the expected files and nothing else, written aside and then moved, so that no half a file is ever read."""
    files = [file.name for file in archive.files]
    wanted = {f"{archive.folder}/{name}" for name in (*files, archive.class_names)}
    with tempfile.TemporaryDirectory(dir=packed.parent) as name, tarfile.open(packed, "r:gz") as tar:
        aside = Path(name)
        for member in tar:
            # None for anything but a regular file or a link inside the archive.
            source = tar.extractfile(member) if str(PurePosixPath(member.name)) in wanted else None
            if source is not None:
                with source, (aside / PurePosixPath(member.name).name).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        lacking = [file for file in files if not (aside / file).exists()]
        if lacking:
            raise tarfile.TarError(f"it lacks {', '.join(lacking)}")
        folder = packed.parent / archive.folder
        folder.mkdir(exist_ok=True)
        for file in aside.iterdir():
            file.replace(folder / file.name)


def _fetch(archive: Archive, packed: Path, progress: bool) -> None:
    """Download the archive unless it is there, and compare its checksum."""
    import pooch

    part = packed.with_name(packed.name + ".part")

    def download(url: str, output_file: str, _: Any) -> None:
        _resume(url, part, archive.size, progress)
        part.replace(output_file)

    root, new = packed.parent, not packed.parent.exists()
    pooch.get_logger().setLevel("INFO" if progress else "WARNING")
    try:
        known = f"sha256:{archive.sha256}"
        pooch.retrieve(archive.url, known, fname=packed.name, path=root, downloader=download)
    except OSError as error:
        kept = part.stat().st_size if part.exists() else 0
        if not kept:
            with suppress(OSError):  # leave nothing behind
                part.unlink(missing_ok=True)
                if new:
                    root.rmdir()
        note = f"; {kept} of {archive.size} bytes are kept for the next try" if kept else ""
        reason = f"{type(error).__name__}{note}"
        raise BadInput(f"cannot download {packed.name} ({reason}): {_advice(archive, root)}") from error
    except ValueError as error:
        # Pooch has deleted what it compared, so that the next try starts afresh.
        reason = f"its checksum differs from the official SHA-256 {archive.sha256}"
        raise BadInput(f"the downloaded {packed.name} is damaged, {reason}: {_advice(archive, root)}") from error


class _Meter:
    """A file open for appending that moves a progress bar as it grows."""

    def __init__(self, file: IO[bytes], label: str, size: int, progress: bool) -> None:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.file = file
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        self.task = self.bar.add_task(label, total=size, completed=file.tell())

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.bar.update(self.task, completed=self.file.tell())

    def flush(self) -> None:
        self.file.flush()


def _resume(url: str, part: Path, size: int, progress: bool) -> None:
    """Append to ``part`` the bytes it still lacks."""
    import pooch

    done = part.stat().st_size if part.exists() else 0
    if done == size:
        return
    with part.open("ab") as file:
        if done > size:
            done = file.truncate(0)
        meter = _Meter(file, PurePosixPath(url).name, size, progress)

        def begin(response: Any, *_: Any, **__: Any) -> None:
            if response.status_code == 200:  # the server ignores Range and sends everything again
                file.truncate(0)

        # Identity, because a range of a re-compressed answer would be a range of something else.
        headers = {"Range": f"bytes={done}-", "Accept-Encoding": "identity"}
        get = pooch.HTTPDownloader(chunk_size=_CHUNK, headers=headers, hooks={"response": begin})
        with meter.bar:
            get(url, meter, None)
    if (done := part.stat().st_size) != size:
        raise ConnectionError(f"{done} of {size} bytes arrived")
