"""One CSV file with a column that says which site a row is from; labels are words. Some seconds on one core."""

import csv
import random
from pathlib import Path

import torch

import lrbpfl

FIELDS = ("hospital", "age", "pressure", "sugar", "outcome")


def write(path: Path, rows: int) -> None:
    """Made-up patients of three hospitals, in the units of everyday."""
    rng = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for hospital, offset in (("Airdrie", 0), ("Bonn", 12), ("Cadiz", -9)):
            for _ in range(rows):
                ill = rng.random() < 0.4
                age, pressure = rng.gauss(50 + 9 * ill, 12), rng.gauss(125 + 18 * ill + offset, 12)
                writer.writerow(
                    [
                        hospital,
                        round(age),
                        round(pressure),
                        round(rng.gauss(95 + 25 * ill, 15)),
                        "ill" if ill else "well",
                    ]
                )


def main(rounds: int = 20, rows: int = 150, file: str = "patients.csv") -> None:
    """Read, put features on one scale, train, write a page."""
    write(Path(file), rows)
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    columns = {"client_column": "hospital", "label_column": "outcome"}
    with lrbpfl.Federation(model, file, seed=0, standardise="pooled", **columns) as federation:
        federation.fit(rounds)
        for name, scores in federation.scores.items():
            print(f"{name:8s} accuracy {scores['accuracy']:.2f}, NLL {scores['nll']:.3f}")
        p = federation.personal("Bonn").predict([[71, 160, 130]])
        print("a patient of 71 in Bonn:", p.label, p.probability.round(2))
        federation.report("patients.html")


if __name__ == "__main__":
    main()
