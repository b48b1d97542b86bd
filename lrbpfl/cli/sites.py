"""The commands about sites of their own: sites init, kit, run, status and demo."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from lrbpfl.cli.options import Quiet
from lrbpfl.errors import BadInput

sites_app = typer.Typer(
    help="Federations between organisations over NVFlare (extra flare): data never leave their site.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The project's directory; who has it can make admins.")]
Kit = Annotated[Path, typer.Option("--kit", "-k", help="An admin's kit.")]
Port = Annotated[int, typer.Option(help="Where sites reach the server.", min=1, max=65535)]
AdminPort = Annotated[int, typer.Option(help="Where admins reach it.", min=1, max=65535)]


@sites_app.callback()
def needs_nvflare() -> None:
    """Say at once if the extra is missing."""
    if find_spec("nvflare") is None:
        raise BadInput("lrbpfl sites needs NVFlare: install it with pip install 'lrbpfl[flare]'")


@sites_app.command()
def init(
    folder: Folder,
    site: Annotated[list[str], typer.Option(help="The name of a site; repeatable.")],
    host: Annotated[str, typer.Option(help="The name under which all sites reach the server.")],
    name: Annotated[str, typer.Option(help="The federation's name.")] = "federation",
    port: Port = 8002,
    admin_port: AdminPort = 8003,
) -> None:
    """Write project.toml, which says who takes part."""
    from lrbpfl.cli import federated

    federated.init(folder, name, host, site, port, admin_port)


@sites_app.command()
def kit(folder: Folder) -> None:
    """Make a kit for everybody in project.toml who has none: certificates, settings and a script that runs it."""
    from lrbpfl.cli import federated

    federated.kit(folder)


@sites_app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file as of run, with a [sites] table.")],
    kit: Kit,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="For the public files; without it, below runs/.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run one algorithm at the sites; the same command goes on after a cut, and nothing is run twice."""
    from lrbpfl.cli import federated

    federated.run(config, kit, out, quiet=quiet)


@sites_app.command()
def status(kit: Kit) -> None:
    """Show which sites are connected, and what they do."""
    from lrbpfl.cli import federated

    federated.status(kit)


@sites_app.command()
def demo(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="It must not exist yet.")] = Path("runs/sites-demo"),
    sites: Annotated[int, typer.Option(help="How many.", min=2, max=8)] = 3,
    quiet: Quiet = False,
) -> None:
    """A server and sites on this machine, with certificates, kits and a run, in about a minute."""
    from lrbpfl.cli import federated

    federated.demo(folder, sites, quiet=quiet)
