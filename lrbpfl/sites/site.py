"""A site of a federation: it answers the hub's letters, and keeps what its clients learn on its own disk."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lrbpfl import trees
from lrbpfl.disk import DiskFault, locked, private_folder, write_file
from lrbpfl.engines.loop import Engine, Evaluation, Reply
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput, plain
from lrbpfl.experiments.judging import Judge
from lrbpfl.experiments.runner import Progress, check_origin, made_with, summarise
from lrbpfl.experiments.store import Run
from lrbpfl.metrics import calibration
from lrbpfl.rng import generator
from lrbpfl.sites import letters
from lrbpfl.sites.bounded import Bounded
from lrbpfl.sites.holdings import Holding, check_steps, hold, settings_of, setup_of
from lrbpfl.sites.job import Job, parse
from lrbpfl.sites.letters import Refused
from lrbpfl.sites.stores import Generations
from lrbpfl.sites.transport import Letter
from lrbpfl.states import States
from lrbpfl.trees import Tree

LOG, LEG = "site.log", "leg.json"
Making = Callable[[Setup, States], Engine]


class Site:
    """Answers one letter at a time, whichever thread brings it; nothing that goes wrong here leaves but as a code."""

    def __init__(self, name: str, root: Path, job: Mapping[str, Any], engine: Making | None = None) -> None:
        self.name, self.root, self._said, self._making = name, root, job, engine
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._log: Path | None = None
        self._leg = self._t = -1
        self._holding: Holding | None = None
        self._work: _Work | None = None
        self._answered: set[tuple[int, int]] = set()  # rounds and clients that were evaluated in this leg

    def answer(self, what: str, letter: Letter) -> Letter:
        """The answer, or a code of what went wrong."""
        with self._lock:
            try:
                return self._answer(what, letters.table(letter))
            except Refused as refused:
                return self._fault(refused.code, refused)
            except DiskFault as fault:
                return self._fault("store", fault)
            except BadInput as fault:
                return self._fault("data" if what == "open" else "state", fault)
            except Exception as error:
                return self._fault("failed", error)

    def end(self) -> None:
        """Let everything go; what was judged is whole."""
        with self._lock:
            try:
                if self._work:
                    self._work.finish()
            except Exception as error:
                self._fault("failed", error)
            finally:
                self._work = None
                self._stack.close()

    def _answer(self, what: str, letter: Letter) -> Letter:
        if what == "open":
            return self._join(letter) if "ids" in letter else self._open(letter)
        if self._work is None:
            raise Refused("replay")
        stamp = {"run": self._work.job.run, "leg": self._leg}
        if any(letter.get(key) != value for key, value in stamp.items()):
            raise Refused("replay")
        if what == "update":
            t = letters.whole(letter, "t", most=self._work.job.config.federation.rounds - 1)
            if t <= self._t:
                raise Refused("replay")
            self._t = t
            return {**stamp, "t": t, "clients": self._work.update(letter, t)}
        if what == "evaluate":
            t = letters.whole(letter, "t", most=self._work.job.config.federation.rounds - 1)
            asked = {(t, k) for k in letters.counted(letter, self._work.ids)}
            if t < self._t or asked & self._answered:
                raise Refused("replay")
            self._t = t
            self._answered |= asked
            return {**stamp, "t": t, "clients": self._work.evaluate(letter, t)}
        if what == "close":
            self._work.finish()
        elif what != "ping":
            raise Refused("letter")
        return stamp

    def _open(self, letter: Letter) -> Letter:
        """The first letter of a leg: who the site's clients are."""
        if self._work or self._holding:
            raise Refused("replay")
        try:
            settings, folder = settings_of(self.root)
        except BadInput as fault:
            return self._fault("settings", fault)
        store = folder / settings.store
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log = store / LOG
        try:
            job = parse(self._said)
        except BadInput as fault:
            return self._fault("job", fault)
        if letter.get("run") != job.run:
            raise Refused("letter")
        leg = letters.whole(letter, "leg", least=1)
        check_steps(job, settings)
        holding = hold(self.name, job, settings, folder)
        path = private_folder(store / job.run)
        try:
            self._stack.enter_context(locked(path))
        except BadInput as fault:
            return self._fault("store", fault)
        if leg <= _read_leg(path):
            self._stack.close()
            raise Refused("replay")
        self._job, self._holding, self._path, self._leg = job, holding, path, leg
        return {"run": job.run, "leg": leg, "clients": list(holding.rows)}

    def _join(self, letter: Letter) -> Letter:
        """The second letter of a leg: the numbers of the site's clients, and how many all sites have."""
        if self._holding is None or self._work or letter.get("leg") != self._leg or letter.get("run") != self._job.run:
            raise Refused("replay")
        ids, total = letters.table(letter["ids"]), letters.whole(letter, "of", least=1)
        rounds = letters.whole(letter, "rounds")
        known = {name: letters.whole(ids, name, most=total - 1) for name in ids}
        if known.keys() != self._holding.rows.keys() or len(set(known.values())) < len(known):
            raise Refused("clients")
        setup = setup_of(self._job, self._holding, dict(sorted(known.items(), key=lambda item: item[1])), total)
        self._work = _Work(self._job, self._holding, setup, self._path, rounds, self._note, self._making)
        self._stack.callback(self._work.engine.close)
        write_file(self._path / LEG, (json.dumps({"leg": self._leg}) + "\n").encode(), private=True)
        return {"run": self._job.run, "leg": self._leg}

    def _fault(self, code: str, error: Exception) -> Letter:
        self._note(f"{code}: {type(error).__name__}: {error}")
        return {"error": code, "type": type(error).__name__}

    def _note(self, text: str) -> None:
        """A line in the site's own log."""
        if self._log:
            with self._log.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(text, 2000)}\n")


class _Work:
    """What a site does in one leg."""

    def __init__(
        self,
        job: Job,
        holding: Holding,
        setup: Setup,
        path: Path,
        rounds: int,
        note: Callable[[str], None],
        making: Making | None,
    ) -> None:
        self.job, self.settings, self.note = job, holding.settings, note
        self.run = Run(path)
        if (path / "config.toml").exists():
            try:
                check_origin(path, setup, Progress(tell=note), any_version=False)
            except BadInput as fault:
                note(str(fault))
                raise Refused("changed") from None
        else:
            self.run.begin(job.config, made_with(setup))
        self._drop_lines(rounds)
        self.states = Generations(path / "clients")
        settings = holding.settings
        self.engine = making(setup, self.states) if making else Bounded(setup, settings, self.states)
        self.setup = self.engine.setup
        self.ids = {k for k, name in enumerate(setup.names) if name in holding.rows}
        self._judge: Judge | None = None
        self._sent: dict[int, Tree] = {}

    def update(self, letter: Letter, t: int) -> dict[str, Any]:
        """Round t at some of the clients: uploads, whose states are on the disk by now."""
        self.finish()
        return {str(reply.client_id): self._replied(reply) for reply in self.engine.update(self._messages(letter), t)}

    def evaluate(self, letter: Letter, t: int) -> dict[str, Any]:
        """Judge some of the clients here; of what comes out, scores and bins leave, if they may."""
        if self._judge and self._judge.t != t:
            self.finish()
        messages = self._messages(letter)
        last = t + 1 == self.job.config.federation.rounds
        newcomer = len(self.setup.training)
        self._sent |= messages
        if last and newcomer not in self._sent:
            named = letters.tensors(letter.get("common")) | letters.tensors(letter.get("newcomer"))
            form = self._template(newcomer)
            wanted = dict(trees.named_leaves(form))
            self._sent[newcomer] = letters.fitted({name: named[name] for name in wanted if name in named}, form)
        judge = self._judge = self._judge or Judge(self.run, self.job.config, self.setup, {}, t, self._sent.__getitem__)
        return {str(found.client_id): self._judged(judge, found) for found in self.engine.evaluate(messages, t)}

    def finish(self) -> None:
        """All clients of a round were judged: the files about them are whole."""
        judge, self._judge = self._judge, None
        if judge is None:
            return
        verdict = judge.finish()
        lines = [{"round": judge.t + 1, "metric": name, "value": value} for name, value in verdict.pooled.items()]
        self.run.record.append(lines)
        if judge.last:
            size = trees.count(self._sent[len(self.setup.training)])
            summarise(self.run, self.job.config, self.setup, size, verdict)
        self._sent = {}

    def _messages(self, letter: Letter) -> dict[int, Tree]:
        counted = letters.counted(letter, self.ids)
        messages = letters.unpack(letter, {k: self._template(k) for k in counted})
        self.states.settle(counted)
        return messages

    def _template(self, k: int) -> Tree:
        """What a message to client k looks like."""
        task = self.setup.task
        if not hasattr(self, "_first"):
            self._first = self.setup.algorithm.init_server(task, generator(self.setup.seed, "server"))
        return self.setup.algorithm.broadcast(task, self._first, k)

    def _replied(self, reply: Reply) -> dict[str, Any]:
        if reply.update is None:
            return self._failed(reply.client_id, reply.failure or "no upload")
        upload = {name: leaf.detach().cpu().contiguous() for name, leaf in trees.named_leaves(reply.update.upload)}
        info = dict(reply.info) if self.settings.info else {}
        said = {"upload": upload, "examples": reply.update.num_examples, "seconds": reply.seconds}
        return {**said, "info": {name: float(value) for name, value in info.items()}}

    def _judged(self, judge: Judge, found: Evaluation) -> dict[str, Any]:
        before, size = judge.examples_train, judge.parameters
        judge.take(found)
        if found.result is None:
            return self._failed(found.client_id, found.failure or "no result")
        if not self.settings.scores:
            return {"kept": True}
        p = judge.judged
        assert p is not None
        bins = calibration.reliability(p.confidence, p.correct)
        table = {
            "counts": bins.counts.tolist(),
            "confidence": bins.confidence.tolist(),
            "correct": [round(value) for value in (bins.accuracy * bins.counts).tolist()],
        }
        about = {"examples": judge.examples_train - before, "parameters": max(size, judge.parameters)}
        return {"scores": dict(judge.told), "bins": table, **about}

    def _failed(self, k: int, text: str) -> dict[str, Any]:
        """A client's failure; its text, which may hold anything, stays here."""
        self.note(f"client {self.setup.names[k]}: {text}")
        kind = re.match(r"[A-Za-z_]\w{0,59}(?=:)", text)
        return {"error": "training", "type": kind.group() if kind else "Failure"}

    def _drop_lines(self, rounds: int) -> None:
        """Drop from the record what the hub goes back before."""
        lines = list(self.run.record.read())
        kept = [line for line in lines if line["round"] <= rounds]
        if len(kept) < len(lines):
            self.run.record.cut(None)
            self.run.record.append(kept)


def _read_leg(path: Path) -> int:
    """The last leg that this run had here."""
    file = path / LEG
    try:
        leg = json.loads(file.read_text())["leg"] if file.exists() else 0
    except (OSError, ValueError, TypeError, KeyError):
        raise BadInput(f"{file} is damaged") from None
    return leg if type(leg) is int else 0
