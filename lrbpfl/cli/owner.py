"""The commands for whoever has a client's own model: export, card."""

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(metavar="FILE", help="A client's model, or the directory of a run.")]
Client = Annotated[str | None, typer.Option(help="Whose model, if a run is given.")]


def export(
    file: File,
    to: Annotated[str, typer.Option(help="NAME.onnx, NAME.pt2 (torch.export) or mlflow:DIRECTORY.")],
    client: Client = None,
    model: Annotated[
        str | None, typer.Option(help="package.module:callable that makes the network, if it is one of your own.")
    ] = None,
) -> None:
    """Write a client's model for other programs; its predictions there are compared with its own first."""
    from lrbpfl.cli import own

    own.export(file, to, client, model)


def card(
    file: File,
    client: Client = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Show what a client's model is, how good it was found to be, and what it holds of the client's data."""
    from lrbpfl.cli import own

    own.card(file, client, as_json=as_json)
