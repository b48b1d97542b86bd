"""What a run's record says of all clients together, round by round where they were judged, as CSV.

python docs/studies/curve.py runs/mine docs/studies/mine.csv "the command that made it"
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

SCORES = ("accuracy", "nll", "ece_pooled", "ece_pooled_low", "ece_pooled_high", "ece_pooled_floor", "ece_worst")


def main(run: Path, out: Path, command: str) -> None:
    """Write the CSV; the loss is the mean over the last ten rounds before."""
    scores: dict[int, dict[str, float]] = defaultdict(dict)
    losses: dict[int, list[float]] = defaultdict(list)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "client" not in found and found.get("metric") in SCORES:
            scores[found["round"]][found["metric"]] = found["value"]
        elif found.get("metric") == "loss":
            losses[found["round"]].append(found["value"])
    with out.open("w", newline="") as file:
        file.write(f"# {command}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", "loss", *SCORES])
        for number, told in sorted(scores.items()):
            recent = [loss for t in range(number - 9, number + 1) for loss in losses[t]]
            writer.writerow([number, f"{fmean(recent):.4f}", *(f"{told[name]:.4f}" for name in SCORES)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
