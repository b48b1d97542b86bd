"""Names of classes are read in the order of the labels, or refused by the name of the file at fault."""

from pathlib import Path

import pytest

from lrbpfl.data.class_names import read_class_names
from lrbpfl.errors import BadInput


def test_one_name_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    assert read_class_names(file, 3) is None
    file.write_bytes(
        "\ufeffarrêt cardiaque\r\n  no finding \r\n\r\n正常\r\n\n".encode()
    )  # as an editor on Windows saves it
    assert read_class_names(file, 3) == ("arrêt cardiaque", "no finding", "正常")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cat\ndog\n", "names 2 classes, and the labels of the data go from 0 to 2: give 3 lines"),
        (b"cat\ndog\nowl\nfox\n", "names 4 classes"),
        (b"", "names 0 classes"),
        (b"cat\n\nowl\n", "names 2 classes"),
        (b"cat\ndog\ncat\n", "gives the name 'cat' to 2 classes"),
        (b"cat\ndog\n\xff\xfe\n", "cannot be read as class names in UTF-8"),
    ],
)
def test_a_file_that_does_not_name_every_class_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "classes.txt"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=f"^{file} {words}") as refusal:
        read_class_names(file, 3)
    assert "\n" not in str(refusal.value)


def test_a_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read as class names"):
        read_class_names(tmp_path, 3)
