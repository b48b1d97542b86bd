"""Options that several commands take."""

from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Plain lines instead of a progress bar.")]
AnyVersion = Annotated[
    bool, typer.Option("--any-version", help="Go on although versions or the device changed: numbers may differ.")
]
