"""The commands about clients' own models: onboard, predict, card, export, serve."""

from pathlib import Path
from typing import Annotated

import typer

commands = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
ModelFactory = Annotated[
    str | None, typer.Option("--model", help="module:callable that gives your own nn.Module, if it is not one of ours.")
]
OwnModel = Annotated[Path, typer.Argument(metavar="FILE", help="A client's model, or the directory of a run.")]
ClientName = Annotated[str | None, typer.Option(help="Whose model, if a run is given.")]


@commands.command("export")
def export_(
    file: OwnModel,
    to: Annotated[str, typer.Option(help="NAME.onnx, NAME.pt2 (torch.export) or mlflow:DIRECTORY.")],
    client: ClientName = None,
    model: ModelFactory = None,
) -> None:
    """Write a client's model for other programs; its predictions there are compared with its own first."""
    from lrbpfl.cli import own

    own.export(file, to, client, model)


@commands.command()
def card(file: OwnModel, client: ClientName = None, as_json: AsJson = False) -> None:
    """Show what a client's model is, how good it was found to be, and what it holds of the client's data."""
    from lrbpfl.cli import own

    own.card(file, client, as_json=as_json)


@commands.command()
def onboard(
    run: Annotated[Path, typer.Argument(help="A finished run, or the W-....safetensors of one.")],
    data: Annotated[Path, typer.Option(help="The new client's data: .npz with x and y, .csv, .json or .parquet.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file for its model; it must not exist yet.")],
    name: Annotated[str, typer.Option(help="What the client is called.")] = "new",
    label: Annotated[str | None, typer.Option(help="The label's column of a table.")] = None,
    hold_out: Annotated[
        float | None, typer.Option(help="Share of its examples that judge the model and make its sets; else a fifth.")
    ] = None,
    model: ModelFactory = None,
    whole: Annotated[bool, typer.Option("--whole", help="Put the shared network into the file too.")] = False,
) -> None:
    """Make the model of a client that took no part: it fits what is its own; nothing is sent."""
    from lrbpfl.cli import models

    models.join(run, data, out, name, label=label, hold_out=hold_out, factory=model, whole=whole)


@commands.command()
def predict(
    file: OwnModel,
    inputs: Annotated[Path, typer.Option("--input", "-i", help=".npz with x, .csv, .json or .parquet; one row each.")],
    client: ClientName = None,
    kind: Annotated[str, typer.Option("--format", "-f", help="csv, json or parquet.")] = "csv",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file; else the terminal.")] = None,
    coverage: Annotated[float | None, typer.Option(help="Also sets that hold the truth so often, e.g. 0.9.")] = None,
    confidence: Annotated[float | None, typer.Option(help="How sure that promise is to be, e.g. 0.95.")] = None,
    model: ModelFactory = None,
) -> None:
    """Predict with a client's own model: labels, probabilities and how sure it is, row by row."""
    from lrbpfl.cli import models

    models.predict(file, inputs, client, kind=kind, out=out, coverage=coverage, confidence=confidence, factory=model)


@commands.command()
def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A finished run, or a folder of personal *.safetensors files.")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; others reach it only if told.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="Ask for the bearer token in this file; else for $LRBPFL_TOKEN, if it is set.")
    ] = None,
    max_bytes: Annotated[int, typer.Option(help="Of one request.", min=1)] = 1_000_000,
    max_rows: Annotated[int, typer.Option(help="Of one request.", min=1)] = 1_000,
    model: ModelFactory = None,
) -> None:
    """Answer over HTTP with every client's own model: /predict, /clients, /health, and a page to try it."""
    from lrbpfl.cli import serve as serving

    serving.serve(directory, host, port, token_file, max_bytes=max_bytes, max_rows=max_rows, factory=model)
