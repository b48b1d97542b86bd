"""The command `serve`: a real service in a process of its own, and what it refuses to begin with."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lrbpfl.cli import serve
from lrbpfl.personal.model import load

from ..serving.conftest import FEATURES, Written
from ..serving.conftest import written as written
from .conftest import Lrbpfl

SECONDS = 60  # at most, to begin or to end


def fetch(address: str, token: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=SECONDS) as reply:
        return json.load(reply)


def test_a_service_begins_answers_and_ends(written: Written, tmp_path: Path) -> None:
    folder = written("lr-bpfl")
    (tmp_path / "token").write_text("s3cret\n")
    command = ["serve", str(folder), "--port", "0", "--token-file", str(tmp_path / "token")]
    code = "from lrbpfl.cli.main import run; run()"
    root = Path(serve.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.match(rf"3 clients of {re.escape(str(folder))} at (http://127\.0\.0\.1:\d+)/ \(with a token\)", line)
        assert found, line
        row = [0.5] * FEATURES
        (answer,) = fetch(f"{found[1]}/predict", "s3cret", {"client": "east", "inputs": [row]})["predictions"]
        expected = load(folder / "east.safetensors").predict([row])
        assert list(answer["probability"].values()) == pytest.approx(expected.probability[0].tolist(), abs=1e-5)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(f"{found[1]}/clients", "wrong")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "stopped\n")
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_told_in_a_sentence(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = lrbpfl("serve", tmp_path / "empty")
    assert (code, out) == (2, "")
    assert err == f"lrbpfl: {tmp_path / 'empty'} is no finished run and holds no personal models (*.safetensors)\n"


def test_a_port_that_is_taken_is_named(lrbpfl: Lrbpfl, written: Written) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = lrbpfl("serve", written("lr-bpfl"), "--port", port)
    assert (code, out) == (2, "")
    assert err.startswith(f"lrbpfl: port {port} of 127.0.0.1 cannot be used: ")


def test_an_empty_token_is_a_mistake(
    lrbpfl: Lrbpfl, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(" \n")
    outcomes = [lrbpfl("serve", written("lr-bpfl"), "--token-file", tmp_path / name) for name in ("token", "none")]
    monkeypatch.setenv(serve.VARIABLE, "")
    outcomes.append(lrbpfl("serve", written("lr-bpfl")))
    assert [outcome.code for outcome in outcomes] == [2, 2, 2]
    sentences = ["holds no token: it is empty", "cannot be read", "LRBPFL_TOKEN holds no token"]
    assert [said in outcome.err for said, outcome in zip(sentences, outcomes, strict=True)] == [True] * 3


def test_a_missing_extra_is_told(lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    code, _, err = lrbpfl("serve", tmp_path)
    assert (code, err) == (
        2,
        "lrbpfl: serve needs fastapi and uvicorn: install them with pip install 'lrbpfl[serve]'\n",
    )


def test_a_bench_of_serving_takes_no_other_option(lrbpfl: Lrbpfl) -> None:
    code, _, err = lrbpfl("bench", "--serve", "--cost")
    assert (code, "give one of them" in err) == (2, True)
