"""What `one-change.sh` found, as CSV: the change of the NLL, seed by seed against the default, and its 95 % interval.

sh docs/studies/one-change.sh && python docs/studies/one_change.py runs/one-change docs/studies/one-change.csv
"""

import csv
import json
import sys
from pathlib import Path

from scipy import stats

FIELDS = ("data", "change", "nll", "nll_change", "low", "high", "accuracy", "ece_debiased", "ece_worst", "seeds")


def rows(folder: Path) -> list[dict[str, object]]:
    """A line for each study and change; the interval is Student's, pairs are seeds."""
    found: list[dict[str, object]] = []
    for study in sorted(folder.glob("*/study.json")):
        for row in json.loads(study.read_text()):
            seeds, scores, change = len(row["folders"]), row["scores"], row["nll_change"]
            line: dict[str, object] = {
                "data": study.parent.name,
                "change": row["label"].split(".", 1)[-1],
                "seeds": seeds,
            }
            line |= {"nll": round(scores["nll"], 4), "accuracy": round(scores["accuracy"], 4)}
            line |= {
                "ece_debiased": round(scores["ece_pooled_debiased"], 4),
                "ece_worst": round(scores["ece_worst"], 4),
            }
            if change is not None:
                half = stats.t.ppf(0.975, seeds - 1) * row["nll_change_spread"] / seeds**0.5
                line |= {
                    "nll_change": round(change, 4),
                    "low": round(change - half, 4),
                    "high": round(change + half, 4),
                }
            found.append(line)
    return found


def main(folder: Path, out: Path) -> None:
    """Write the CSV."""
    with out.open("w", newline="") as file:
        file.write(
            "# One change from the default of lr-bpfl, on validation parts, seeds 100 to 104; low and high: 95 %.\n"
        )
        file.write("# sh docs/studies/one-change.sh\n")
        file.write("# python docs/studies/one_change.py runs/one-change docs/studies/one-change.csv\n")
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
