"""What a comparison comes to, in words that hold whoever wins."""

from collections.abc import Mapping, Sequence
from typing import Any

from lrbpfl.experiments.config import read_name
from lrbpfl.reports.tables import Best

Summary = Mapping[str, Mapping[str, Any]]

REFERENCES = {"local": "training alone", "fedavg": "one network for all"}  # what everybody could do instead
WORDS = {"accuracy": "accuracy", "nll": "likelihood", "ece_pooled": "calibration"}


def verdict(summary: Summary, best: Best) -> str | None:
    """How LR-BPFL, or else whoever has the best likelihood, fares against the references; and who is best in what.

    None if neither reference takes part, or nobody besides.
    """
    judged = {name: s for name, s in summary.items() if s.get("accuracy") is not None and s.get("nll") is not None}
    others = [name for name in judged if name != "local"]
    if not others:
        return None
    ours = [name for name in others if read_name(name).name == "lr-bpfl"]
    subject = ours[0] if ours else min(others, key=lambda name: float(judged[name]["nll"]))
    clauses = [
        _against(judged[subject], judged[name], f"{words} ({name})")
        for name, words in REFERENCES.items()
        if name in judged and name != subject
    ]
    if not clauses:
        return None
    return " ".join([f"{subject} is {', and '.join(clauses)}.", *_winners(subject, list(judged), best)])


def _against(mine: Mapping[str, Any], other: Mapping[str, Any], whom: str) -> str:
    """`4.1 points and 0.25 nats ahead of whom`; what is level to the digits shown is left out."""
    gaps = (
        (f"{100 * (mine['accuracy'] - other['accuracy']):.1f}", "points"),
        (f"{other['nll'] - mine['nll']:.2f}", "nats"),
    )
    ahead = [f"{gap} {unit}" for gap, unit in gaps if float(gap) > 0]
    behind = [f"{gap[1:]} {unit}" for gap, unit in gaps if float(gap) < 0]
    if ahead and behind:
        return f"{ahead[0]} ahead of {whom} but {behind[0]} behind"
    if ahead:
        return f"{_listed(ahead)} ahead of {whom}"
    return f"{_listed(behind)} behind {whom}" if behind else f"level with {whom}"


def _winners(subject: str, names: Sequence[str], best: Best) -> list[str]:
    """`Of the 4, it has the best likelihood; it is among the best in accuracy ...`; nothing if nobody stands out."""
    shared: dict[str, list[str]] = {}
    for key, word in WORDS.items():
        winners = [name for name in names if name in best.get(key, ())]
        if subject in winners:
            shared.setdefault("it has the best" if len(winners) == 1 else "it is among the best in", []).append(word)
        elif winners:
            verb = "has" if len(winners) == 1 else "share"
            shared.setdefault(f"{_listed(winners)} {verb} the best", []).append(word)
    told = [f"{who} {_listed(words)}" for who, words in shared.items()]
    return [f"Of the {len(names)}, {'; '.join(told)}, as far as these clients can tell."] if told else []


def _listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
