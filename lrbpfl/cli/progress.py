"""What a run shows while it goes on: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lrbpfl.engines.loop import Round
from lrbpfl.experiments import runner, tracking
from lrbpfl.experiments.config import Config

LINES_EVERY = 30.0  # seconds between plain lines of rounds that were not judged


class Display:
    """A rich progress bar, or plain lines if asked for or if nobody looks at a terminal."""

    def __init__(self, *, quiet: bool, track: str | None = None, many: bool = False, silent: bool = False) -> None:
        self.track = track
        self.many = many  # runs: the bar of a finished one makes room for the next
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=silent)
        self.plain = quiet or not self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TextColumn("{task.fields[scores]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=self.plain,
        )

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def listener(self, name: str, rounds: int) -> "Listener":
        """The listener for one run."""
        return Listener(self, name, rounds)

    def progress(self, name: str, config: Config) -> runner.Progress:
        """What a run tells its listener, and its tracker."""
        shown = self.listener(name, config.federation.rounds).callbacks()
        if self.track is None:
            return shown
        return tracking.follow(self.track, shown, lambda text: self.console.print(f"{name}: {text}", markup=False))


class Listener:
    """Turns what a run tells into what a person sees."""

    def __init__(self, display: Display, name: str, rounds: int) -> None:
        self.display, self.name, self.rounds = display, name, rounds
        self.task: TaskID | None = None
        self.done: dict[tuple[str, int], int] = {}
        self.scores = ""
        self.last_line = time.monotonic()

    def callbacks(self) -> runner.Progress:
        """What a run of this machine tells."""
        return runner.Progress(client=self.client, round=self.round, tell=self.tell)

    def client(self, what: str, t: int, k: int, of: int) -> None:
        """A client was trained or judged."""
        self.done[what, t] = self.done.get((what, t), 0) + 1
        verb = {"update": "training", "evaluate": "judging"}[what]
        self._show(completed=t, now=f"{verb} clients {self.done[what, t]}/{of}")

    def round(self, ended: Round, pooled: Mapping[str, float]) -> None:
        """A round ended, after which clients may have been judged."""
        self.reached(ended.t + 1, ended.mean_loss, pooled)
        self._tell_events(ended)

    def reached(self, rounds: int, mean_loss: float | None, pooled: Mapping[str, float], besides: str = "") -> None:
        """So many rounds are done."""
        loss = f"loss {mean_loss:.3f}" if mean_loss is not None else ""
        if pooled:
            self.scores = f"accuracy {100 * pooled['accuracy']:.1f} %  ECE {pooled['ece_pooled']:.3f}"
        self._show(completed=rounds, now=f"{loss}  {besides}".rstrip())
        if self.display.plain and (pooled or time.monotonic() - self.last_line > LINES_EVERY):
            self.last_line = time.monotonic()
            text = f"{self.name}: round {rounds}/{self.rounds}  {loss}  {self.scores if pooled else ''}  {besides}"
            self.display.console.print(text.rstrip(), markup=False)

    def tell(self, sentence: str) -> None:
        """Something that a person should know."""
        self.display.console.print(f"note: {sentence}", markup=False)

    def _show(self, *, completed: int, now: str) -> None:
        if self.task is None:  # a run that is finished already shows no bar
            for task in self.display.bar.task_ids if self.display.many else ():
                self.display.bar.remove_task(task)
            self.task = self.display.bar.add_task(self.name, total=self.rounds, now="", scores="")
        self.display.bar.update(self.task, completed=completed, now=now, scores=self.scores)

    def _tell_events(self, ended: Round) -> None:
        if ended.undone:
            text = f"{self.name}: round {ended.t + 1} undone: {ended.undone}"
            self.display.console.print(text, markup=False)
        kinds = (("run again", ended.retried), ("skipped", ended.failures), ("not judged", ended.unjudged))
        for verb, events in kinds:
            for k, reason in events.items():
                text = f"{self.name}: round {ended.t + 1}: client {k} {verb}: {reason}"
                self.display.console.print(text, markup=False)
