"""What MLflow loads, in a process that has never seen the model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from lrbpfl.errors import BadInput
from lrbpfl.models import mlp
from lrbpfl.personal.factory import model_from
from lrbpfl.personal.mlflow_model import to_mlflow
from tests.personal.small import CLASSES, FEATURES, personal, rows

pytest.importorskip("mlflow")
pytest.importorskip("pandas")

ASK = """
import json, sys
import numpy as np, pandas as pd
from mlflow import pyfunc
loaded, x = pyfunc.load_model(sys.argv[1]), np.array(json.loads(sys.argv[2]))
tables = [loaded.predict(given) for given in (x, x.astype(np.float32), pd.DataFrame(x))]
assert all(table.equals(tables[0]) for table in tables)
print(tables[0].to_json(orient="split", double_precision=15))
"""


def ask(folder: Path, home: Path) -> dict[str, list[object]]:
    """The table that a fresh process gets from the model, by columns."""
    given = json.dumps(rows(3).tolist())
    done = subprocess.run([sys.executable, "-c", ASK, folder, given], capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    return {name: [row[i] for row in table["data"]] for i, name in enumerate(table["columns"])}


def test_a_fresh_process_gets_the_clients_predictions_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from tests.personal.small import network as make\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.syspath_prepend(tmp_path)
    model = personal(mask_steps=2)
    done = to_mlflow(model, tmp_path / "model", model="mine:make")
    table, expected = ask(done.path, tmp_path), model.predict(rows(3))
    assert table["label"] == expected.label.tolist()
    probability = np.array([table[f"probability_{c}"] for c in "abcd"]).T
    np.testing.assert_allclose(probability.astype(float), expected.probability, atol=1e-12)
    np.testing.assert_allclose(np.array(table["epistemic"], dtype=float), expected.epistemic, atol=1e-12)


def test_the_directory_is_private_and_holds_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").touch()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'secret'\nversion = '1'\n")
    monkeypatch.chdir(tmp_path)
    model = personal("fedavg")
    folder = to_mlflow(model, "here/model", model="tests.personal.small:network").path
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert set(files) == {"MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt", "personal.safetensors"}
    assert set(files.values()) == {0o600} and folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    with pytest.raises(BadInput, match="exists already"):
        to_mlflow(model, folder, model="tests.personal.small:network")


def another() -> nn.Module:
    return nn.Linear(12, 4)


def test_a_network_of_ones_own_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--model package\.module:callable"):
        to_mlflow(personal("fedavg"), tmp_path / "model")
    with pytest.raises(BadInput, match="belongs to another model"):
        to_mlflow(personal("fedavg"), tmp_path / "model", model="tests.personal.test_mlflow_model:another")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine", "write it as package.module:callable"),
        ("no_such_module:make", "cannot be imported: ModuleNotFoundError"),
        ("math:no", "math has no 'no'"),
        ("math:pi", "is a float"),
        ("math:sqrt", "cannot be called without arguments"),
        ("builtins:dict", "returns a dict"),
    ],
)
def test_a_name_that_makes_no_network_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        model_from(name)


def test_mlflow_serves_it(tmp_path: Path) -> None:
    """By MLflow's own command, on loopback, with the environment that is there."""
    pytest.importorskip("uvicorn")
    model = personal("fedavg", mlp(CLASSES, (FEATURES,)))
    folder, port, binaries = to_mlflow(model, tmp_path / "model").path, free_port(), Path(sys.executable).parent
    command = ["mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local", "--port", str(port)]
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    server = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    try:
        answer = asked(port, {"inputs": rows(2).tolist()}, server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    expected = model.predict(rows(2))
    assert [row["label"] for row in answer["predictions"]] == expected.label.tolist()
    assert [row["probability_a"] for row in answer["predictions"]] == pytest.approx(expected.probability[:, 0].tolist())


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port: int = some.getsockname()[1]
        return port


def asked(port: int, body: dict[str, Any], server: "subprocess.Popen[bytes]") -> Any:
    """The answer, as soon as the server is up; it has a minute."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    for _ in range(120):
        assert server.poll() is None, server.stderr.read() if server.stderr else ""
        try:
            with opener.open(request, timeout=30) as response:
                return json.loads(response.read())
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.5)
    raise AssertionError("the server does not come up")
