import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from lrbpfl.errors import BadInput
from lrbpfl.sites.flare import kits, project, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project") / "p"
    project.create(folder, "p", "localhost", ["a", "b"], 1, 2)
    kits.make_kits(folder)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", ["localhost", "a"])
def test_server_and_sites_let_in_no_code_but_ours_and_nobody_looks_at_files(folder: Path, name: str) -> None:
    local = folder / "kits" / name / "local"
    ours, theirs = (read(local / file)["class_allow_list"] for file in ("resources.json", "resources.json.default"))
    assert set(ours) - set(theirs) == {
        "nvflare.collab.runtime.controller.CollabController",
        "nvflare.collab.runtime.executor.CollabExecutor",
        "lrbpfl.sites.flare.",
    }
    rights = read(local / "authorization.json")["permissions"]
    assert rights.keys() == set(project.ROLES)
    for role in rights.values():
        assert role["byoc"] == role["shell_commands"] == "none"
    assert [role for role in rights if rights[role].get("submit_job") == "any"] == ["project_admin", "lead"]


def test_a_site_streams_no_logs_and_logs_no_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = folder / "kits" / "a"
    assert read(kit / "local" / "resources.json")["allow_log_streaming"] is False
    ran: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: ran.append(arguments))
    monkeypatch.setenv("NVFL_WORKSPACE", "elsewhere")
    start.main(kit)
    ((_, command, environment),) = ran
    assert command[-2:] == [str(kit / "startup" / "sub_start.sh"), "--once"]
    assert environment["NVFLARE_SECURE_LOGGING"] == "1" and "NVFL_WORKSPACE" not in environment
    assert "lrbpfl.sites.flare.start" in (kit / "run.sh").read_text()


def test_a_server_keeps_jobs_in_its_kit(folder: Path, tmp_path: Path) -> None:
    kit = tmp_path / "moved"
    shutil.copytree(folder / "kits" / "localhost", kit)
    start.settle(kit)
    told = read(kit / "local" / "resources.json")
    uris = [part["args"]["uri_root"] for part in told["components"] if part["id"] == "job_manager"]
    assert uris == [str(kit / "jobs")]
    assert told["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] == str(kit / "snapshots")


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    for path in [*(folder / "state").rglob("*"), *(folder / "kits").iterdir()]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_new_site_leaves_the_other_kits_as_they_are(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "p")
    before = digests(tmp_path / "p" / "kits")
    path = tmp_path / "p" / project.FILE
    path.write_text(path.read_text() + "\n" + project.SITE.format(site="later", organisation="x"))
    assert [kit.name for kit in kits.make_kits(tmp_path / "p")] == ["later"]
    after = digests(tmp_path / "p" / "kits")
    assert {name: after[name] for name in before} == before
    assert after["later/startup/rootCA.pem"] == before["a/startup/rootCA.pem"]
    assert kits.make_kits(tmp_path / "p") == []


def test_without_the_root_key_no_second_root_is_made(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "p")
    shutil.rmtree(tmp_path / "p" / "state")
    shutil.rmtree(tmp_path / "p" / "kits" / "b")
    with pytest.raises(BadInput, match="bring it back"):
        kits.make_kits(tmp_path / "p")
    assert not (tmp_path / "p" / "state").exists()


def test_a_copy_of_a_kit_is_refused_and_a_moved_one_is_not(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    handle = start.claim(kit)
    with pytest.raises(BadInput, match="runs already"):
        start.claim(kit)
    os.close(handle)
    shutil.copytree(kit, tmp_path / "copy")
    with pytest.raises(BadInput, match="is a copy"):
        start.claim(tmp_path / "copy")
    os.close(start.claim(kit.rename(tmp_path / "moved")))


def test_a_kits_settings_are_a_sites(folder: Path) -> None:
    holdings = pytest.importorskip("lrbpfl.sites.holdings")
    settings, where = holdings.settings_of(folder / "kits" / "a")
    assert settings.data == "data.csv" and where == folder / "kits" / "a"
