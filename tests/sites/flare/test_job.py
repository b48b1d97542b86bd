import json
from pathlib import Path

import pytest
import torch

from lrbpfl.errors import BadInput
from lrbpfl.sites.flare import wire
from lrbpfl.sites.flare.job import pack, unpack, write_job

JOB = {"run": "r", "sites": ["b", "a"], "minimum": 2, "config": {"x": {"y": "{z} $v ${w} 100 % \u00e9 'q' \"q\" \\"}}}


def test_a_job_is_three_files_of_json_and_no_code(tmp_path: Path) -> None:
    write_job(tmp_path / "job", JOB)
    files = sorted(path.relative_to(tmp_path / "job").as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]
    server = json.loads((tmp_path / "job" / files[1]).read_text())
    assert unpack(server["components"][0]["args"]["job"]) == JOB
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["min_clients"] == 2 and meta["deploy_map"] == {"app": ["server", "b", "a"]}


def test_a_packed_job_has_nothing_that_nvflare_fills_in() -> None:
    assert not set("{}$") & set(pack(JOB))


@pytest.mark.parametrize("text", ["", "[]", "{", "%7B"])
def test_what_is_no_job_is_told(text: str) -> None:
    with pytest.raises(BadInput, match="another version"):
        unpack(text)


def test_the_wire_counts_bytes_and_keeps_no_values() -> None:
    traffic: wire.Traffic = {}
    wire.count(traffic, "update", {"tree": {"a": torch.zeros(250)}, "t": 3}, up=False)
    wire.count(traffic, "update", {"secret": "text"}, up=True)
    assert traffic["update"]["down"] == 250 * 4 + len("tree") + len("a") + len("t") + 8
    assert "text" not in json.dumps(traffic)
    both = wire.add(traffic, json.loads(json.dumps(traffic)))
    assert both["update"]["letters"] == 2 and both["update"]["down"] == 2 * traffic["update"]["down"]
    assert list(wire.lines(both)) == ["update: 2 letters to sites, 2.0 kB (t, tree); 2 answers, 0.0 kB (secret)"]
