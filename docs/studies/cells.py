"""A page that `lrbpfl paper report` wrote, as CSV: one line for each cell, what stands above the tables as comments.

python docs/studies/cells.py runs/pages/transfer.md docs/studies/transfer.csv
"""

import csv
import re
import sys
from pathlib import Path

SPREAD = re.compile(r"^(-?[\d.,]+)(?: ± ([\d.]+))?(?: \(([\d.]+)(?:; ([\d.]+) to ([\d.]+))?\))?$")
FIELDS = ("table", "row", "column", "value", "spread", "floor", "low", "high", "paper")


def cells(text: str) -> list[dict[str, str]]:
    """Every cell of every table; a column called `paper` is about the one before it."""
    found: list[dict[str, str]] = []
    table, head = "", list[str]()
    for line in text.splitlines():
        if line.startswith("#"):
            table, head = line.lstrip("# "), []
        elif line.startswith("|"):
            parts = [part.strip() for part in line.strip("|").split("|")]
            if set("".join(parts)) <= set("-: "):
                continue
            if not head:
                head = parts
                continue
            for column, part in list(zip(head, parts, strict=False))[1:]:
                if column.startswith("paper") and found:
                    found[-1]["paper"] = "" if part == "–" else part
                else:
                    found.append({"table": table, "row": plain(parts[0]), "column": plain(column), **cell(plain(part))})
        else:
            head = []
    return [row for row in found if row["value"] not in ("", "–") or row.get("paper")]


def plain(part: str) -> str:
    """Without the marks of bold and code."""
    return part.replace("**", "").replace("`", "")


def cell(part: str) -> dict[str, str]:
    """0.034 ± 0.006 (0.024; 0.000 to 0.037) in its parts; anything else as it stands."""
    match = SPREAD.match(part)
    if not match:
        return {"value": part}
    value, spread, floor, low, high = (group or "" for group in match.groups())
    return {"value": value, "spread": spread, "floor": floor, "low": low, "high": high}


def main(page: Path, out: Path) -> None:
    """Write the CSV; comments hold the page's own words, its commands among them."""
    text = page.read_text()
    told = [line for line in text.splitlines() if line.strip() and not line.startswith(("|", "##", "!["))]
    with out.open("w", newline="") as file:
        file.writelines(f"# {line.lstrip('# ')}\n" for line in told if not line.startswith("```"))
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
