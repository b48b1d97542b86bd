"""The command `report`: a page, and figures, about finished runs."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lrbpfl.disk import usable, write_file
from lrbpfl.errors import BadInput
from lrbpfl.reports.collect import collect
from lrbpfl.reports.finished import reading
from lrbpfl.reports.page import render


def report(runs: Sequence[Path], out: Path | None, figures: Path | None, overview: Path | None = None) -> None:
    """Write the page, and the figures if they are asked for; say where."""
    if (figures or overview) and not find_spec("matplotlib"):
        raise BadInput("--figures and --overview need matplotlib: install it with pip install 'lrbpfl[report]'")
    if overview and overview.suffix not in (".svg", ".png"):
        raise BadInput(f"--overview names a file that ends in .svg or .png, and {overview} does not")
    out = usable(out or runs[0] / "report.html")
    if out.is_dir():
        raise BadInput(f"{out} is a directory, and --out names the page: give a file like {out / 'report.html'}")
    results = collect(runs)
    with reading(runs[0]):  # files that are well each may still contradict each other
        files = {out: render(results).encode(errors="replace")}
        if figures:
            from lrbpfl.reports.figures import draw

            files |= {usable(figures) / name: data for name, data in draw(results)}
        if overview:
            from lrbpfl.reports import overview as glance

            files[usable(overview)] = glance.overview(results, overview.suffix[1:])
    for path, data in files.items():
        try:
            write_file(path, data)
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from None
    print(f"The page: {out}")
    if figures:
        print(f"In {figures}: {', '.join(path.name for path in files if path not in (out, overview))}")
