"""What a run's record says of all clients together, round by round where they were judged, as rows of a CSV.

    python docs/studies/curve.py runs/mine docs/studies/paper-scale.csv [NAME]

Rows of that name, the run's algorithm's unless it is given, are replaced; the others and the comments stay.
"""

import csv
import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import fmean

SCORES = ("accuracy", "nll", "ece_pooled", "ece_pooled_low", "ece_pooled_high", "ece_pooled_floor", "ece_worst")


def curve(run: Path, name: str | None = None) -> list[dict[str, str]]:
    """A row for each round in which clients were judged; the loss is the mean over the last ten rounds before."""
    scores: dict[int, dict[str, float]] = defaultdict(dict)
    losses: dict[int, list[float]] = defaultdict(list)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "client" not in found and found.get("metric") in SCORES:
            scores[found["round"]][found["metric"]] = found["value"]
        elif found.get("metric") == "loss":
            losses[found["round"]].append(found["value"])
    own = tomllib.loads((run / "config.toml").read_text())["algorithm"]["name"]
    return [
        {
            "algorithm": name or own,
            "round": str(number),
            "loss": f"{fmean(loss for t in range(number - 9, number + 1) for loss in losses[t]):.4f}",
            **{score: f"{told[score]:.4f}" for score in SCORES},
        }
        for number, told in sorted(scores.items())
    ]


def main(run: Path, out: Path, name: str | None = None) -> None:
    """Put the run's rows into the CSV."""
    lines = out.read_text().splitlines() if out.exists() else []
    comments, rows = ([line for line in lines if line.startswith("#") is told] for told in (True, False))
    new = curve(run, name)
    if not new:
        sys.exit(f"{run}: no round was judged yet")
    others = [row for row in csv.DictReader(rows) if row["algorithm"] != new[0]["algorithm"]]
    with out.open("w", newline="") as file:
        file.writelines(f"{line}\n" for line in comments)
        writer = csv.DictWriter(file, new[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(others + new)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
