"""`lrbpfl`: the commands, their options and their exit codes. Heavy imports wait until a command needs them."""

import errno
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lrbpfl.cli.items import paper_app
from lrbpfl.cli.options import AnyVersion, Quiet
from lrbpfl.cli.personal import commands
from lrbpfl.cli.sites import sites_app
from lrbpfl.errors import BadInput, plain, shown

app = typer.Typer(
    help="Calibrated, personalised federated learning: one shared network, a private Bayesian mask at every client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="A TOML file with sections like config.toml of a run.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="section.key=value, on top of the file; repeatable.")
]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="processes, serial, ray or a package's: short for --set engine.kind=...")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run directory; it must not exist yet.")]
Track = Annotated[str | None, typer.Option(help="tensorboard or mlflow: write the curves there too (extra track).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def _with_engine(settings: list[str] | None, engine: str | None) -> list[str]:
    return [*(settings or []), *([] if engine is None else [f"engine.kind={engine}"])]


@app.command("run")
def run_(
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="Its name, name:preset or name+temper.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    engine: EngineName = None,
    out: Out = None,
    quiet: Quiet = False,
    track: Track = None,
) -> None:
    """Run one algorithm; without arguments, LR-BPFL on the vowels of fifteen speakers."""
    from lrbpfl.cli import runs

    runs.run(algorithm, config, _with_engine(settings, engine), out, quiet=quiet, track=track)


@app.command()
def compare(
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help="Names (or name:preset, name+temper), comma separated; or: all.")
    ] = "lr-bpfl,fedavg,fedavg-ft,local",
    config: ConfigFile = None,
    settings: Settings = None,
    engine: EngineName = None,
    out: Out = None,
    quiet: Quiet = False,
    track: Track = None,
) -> None:
    """Run several algorithms on identical clients, splits and seeds, and show them in one table.

    An algorithm's own fields are set as algorithm.NAME.key=value.

    NAME+temper fits a temperature after training, on 15 % of its training data, on which it then does not train.
    """
    from lrbpfl.cli import runs

    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    runs.compare(names, config, _with_engine(settings, engine), out, quiet=quiet, track=track)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="The directory of a run or a comparison that was cut off.")],
    quiet: Quiet = False,
    track: Track = None,
    any_version: AnyVersion = False,
) -> None:
    """Go on with a run that was cut off; it ends in the same bits."""
    from lrbpfl.cli import runs

    runs.resume(directory, quiet=quiet, track=track, any_version=any_version)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs or comparisons, side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; without it, report.html in the first RUN.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="A directory for its figures, but those of single clients, as PNG and SVG.")
    ] = None,
    overview: Annotated[
        Path | None, typer.Option(help="A picture, .svg or .png: how sure each run is and how often it is right.")
    ] = None,
) -> None:
    """Write one HTML page about finished runs; it needs no network and no other file."""
    from lrbpfl.cli import pages

    pages.report(runs, out, figures, overview)


@app.command()
def tune(
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="Its name, name:preset or name+temper.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", help="section.key=value,value: what to try; with a semicolon between, fields at once; repeatable."
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="All combinations instead of one change at a time.")] = False,
    seeds: Annotated[int, typer.Option(help="Each row is the mean over this many seeds.", min=1)] = 1,
    config: ConfigFile = None,
    settings: Settings = None,
    engine: EngineName = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A directory; given again, it goes on.")] = None,
    quiet: Quiet = False,
    any_version: AnyVersion = False,
) -> None:
    """Try values of fields, judged by the likelihood of validation parts of training splits; no test data take part.

    The same command goes on where it was cut off; runs that are in the directory already are not repeated.

    Changes of the NLL are against the row `as it is` (in a grid: its first combination), seed by seed.
    """
    from lrbpfl.cli import studies

    studies.tune(
        algorithm,
        vary or [],
        config,
        _with_engine(settings, engine),
        out,
        grid=grid,
        seeds=seeds,
        quiet=quiet,
        any_version=any_version,
    )


@app.command()
def partition(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show which client would get what, without running anything."""
    from lrbpfl.cli import shares

    shares.show(config, settings or [], as_json=as_json)


@app.command()
def bench(
    cost: Annotated[
        bool, typer.Option("--cost", help="Instead: what each algorithm sends, keeps and computes, beside FedAvg.")
    ] = False,
    service: Annotated[
        bool,
        typer.Option("--serve", help="Instead: how fast models of many clients answer, and their memory."),
    ] = False,
    scale: Annotated[
        bool,
        typer.Option("--scale", help="Instead: time and memory of a round with 100 to 100,000 clients."),
    ] = False,
    engines: Annotated[
        bool, typer.Option("--engines", help="Instead: the seconds of a round in every engine, Ray if it is installed.")
    ] = False,
    as_json: AsJson = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Each time is the best of this many, taken in turns; 10, or 3 with --cost or --engines.", min=1
        ),
    ] = None,
) -> None:
    """Measure the speed of a mask step and of two workers against one; or what algorithms, serving or clients cost."""
    from lrbpfl.cli import measure

    if sum((cost, service, scale, engines)) > 1:
        raise BadInput("--cost, --serve, --scale and --engines measure different things: give one of them")
    if repeats and (service or scale):
        raise BadInput("--serve and --scale measure for a fixed time: give them without --repeats")
    if service:
        measure.service(as_json=as_json)
    elif scale:
        measure.scale(as_json=as_json)
    elif engines:
        measure.engines(repeats or 3, as_json=as_json)
    elif cost:
        measure.cost(repeats or 3, as_json=as_json)
    else:
        measure.bench(repeats or 10, as_json=as_json)


@app.command()
def doctor() -> None:
    """Look at versions, cores and data, and train for a few seconds to see that all is well."""
    from lrbpfl.cli import measure

    measure.doctor()


@app.command()
def keys(
    which: Annotated[
        str | None, typer.Argument(metavar="[WHICH]", help="A section, an algorithm or a key: data, algorithm.fedavg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be set, with what each key takes, its default and its meaning."""
    from lrbpfl.cli import keys as listing

    listing.show(which, as_json=as_json)


app.registered_commands += commands.registered_commands
app.add_typer(paper_app, name="paper")
app.add_typer(sites_app, name="sites")


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Print the version if asked to."""
    if show:
        from importlib.metadata import version

        print(f"lrbpfl {version('lrbpfl')}")
        raise typer.Exit


def run() -> None:
    """The entry point: bad input is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need be no text
    try:
        app()
    except BadInput as error:
        _end(2, error)
    except RecursionError:
        _end(2, "the input is nested more deeply than Python can follow")
    except MemoryError:
        _end(1, "this machine has too little memory for what was asked for; a run directory that was begun is left")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _end(2, f"the path {shown(error.filename)} is too long for this system")


def _end(code: int, sentence: object) -> NoReturn:
    print(f"lrbpfl: {plain(sentence)}", file=sys.stderr)
    sys.exit(code)
