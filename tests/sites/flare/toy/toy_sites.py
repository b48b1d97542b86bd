"""A hub and a site that only count, for the kits' own processes: what NVFlare does is tested, not what we train."""

import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Lost(NamedTuple):
    reason: str


class Site:
    """Adds one to what it gets and counts on its disk."""

    def __init__(self, name: str, root: Path, job: Any) -> None:
        self.name, self.file, self.lock = name, root / "count.json", threading.Lock()

    def answer(self, what: str, letter: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if what == "open" and self.name == letter.get("fails"):
                raise ValueError("a secret text")
            if what == "update":
                time.sleep(letter["seconds"])
                count = json.loads(self.file.read_text()) + 1 if self.file.exists() else 1
                self.file.write_text(json.dumps(count))
                return {"name": self.name, "tree": {"a": letter["tree"]["a"] + 1}, "t": letter["t"]}
            return {"name": self.name}

    def end(self) -> None:
        pass


def lead(transport: Any, root: Path, job: Any, aborted: Any, reached: Any) -> dict[str, Any]:
    """Rounds until the wanted number or until too few sites answer; state.json is the checkpoint."""
    run, config = root / "runs" / job["run"], job["config"]
    run.mkdir(parents=True, exist_ok=True)
    file = run / "state.json"
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"leg": 0, "rounds": 0, "log": []}
    state["leg"] += 1
    lost: dict[str, str] = {}
    opened = transport.call("open", {name: {"fails": config.get("fails")} for name in transport.sites}, 20)
    lost.update({name: answer.reason for name, answer in opened if isinstance(answer, Lost)})
    while state["rounds"] < config["rounds"] and not aborted():
        tree = {"a": torch.zeros(3, dtype=torch.bfloat16)}
        letters = {n: {"t": state["rounds"], "tree": tree, "seconds": config["seconds"]} for n in transport.sites}
        letters = {name: letter for name, letter in letters.items() if name not in lost}
        good = []
        for name, answer in transport.call("update", letters, config["limit"]):
            if isinstance(answer, Lost):
                lost[name] = answer.reason
            else:
                assert torch.equal(answer["tree"]["a"], tree["a"] + 1)
                good.append(name)
        if len(good) < job["minimum"]:
            break
        state["rounds"] += 1
        state["log"].append(sorted(good))
        reached({"rounds": state["rounds"], "loss": None, "scores": {}, "away": sorted(lost)})
        file.write_text(json.dumps(state))
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"leg": state["leg"], "good": g}) + "\n" for g in state["log"])
        )
    told = {"run": job["run"], "leg": state["leg"], "rounds": state["rounds"], "of": config["rounds"], "lost": lost}
    return {
        **told,
        "complete": state["rounds"] >= config["rounds"],
        "told": ["the table"],
        "error": config.get("error"),
    }


PARTS: dict[str, dict[str, Any]] = {
    "transport": {"Lost": Lost, "Letter": dict, "What": str},
    "hub": {"lead": lead},
    "site": {"Site": Site},
}
for name, parts in PARTS.items():
    module = ModuleType(f"lrbpfl.sites.{name}")
    vars(module).update(parts)
    sys.modules[module.__name__] = module

from lrbpfl.sites.flare.apps import HubApp, SiteApp  # noqa: E402, F401 - after their parts were exchanged
