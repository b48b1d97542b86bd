"""Files are whole or not there, and private ones are for their owner alone, whatever the umask."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrbpfl.disk import LOCK, DiskFault, locked, private_folder, write_file
from lrbpfl.errors import BadInput


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes(umask: int, tmp_path: Path) -> None:
    write_file(tmp_path / "own" / "mask", b"mine", private=True)
    write_file(tmp_path / "all" / "page", b"ours")
    assert (mode(tmp_path / "own" / "mask"), mode(tmp_path / "own")) == (0o600, 0o700)
    assert (mode(tmp_path / "all" / "page"), mode(tmp_path / "all")) == (0o666 & ~umask, 0o777 & ~umask)
    assert mode(private_folder(tmp_path / "clients")) == 0o700


def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    """Neither an older file of that name nor a leftover of a killed process keeps it open to others."""
    for name in ("mask", ".mask.part"):
        (tmp_path / name).write_bytes(b"old")
        (tmp_path / name).chmod(0o666)
    write_file(tmp_path / "mask", b"new", private=True)
    assert (tmp_path / "mask").read_bytes() == b"new" and mode(tmp_path / "mask") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mask"]


def test_what_was_there_stays_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFault, match="file cannot be written: No space left on device"):
        write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def hold(folder: str) -> subprocess.Popen[str]:
    """Another process that holds the folder, and says so."""
    code = "import sys; from pathlib import Path; from lrbpfl.disk import locked\nwith locked(Path(sys.argv[1])): "
    code += "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_folder_has_one_writer_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    with hold(str(tmp_path)) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"is being written by process {other.pid}: wait until"), locked(tmp_path):
            pass
        other.kill()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    with locked(tmp_path), pytest.raises(BadInput, match="by this process already"), locked(tmp_path / "." / ""):
        pass
    assert not list(tmp_path.iterdir())
