"""The page to try a service with: one file, which asks nothing of any other place."""

from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def page() -> str:
    """The page, in the style of reports; it holds no names, but asks for them with the token that its reader gives."""
    package = files("lrbpfl")
    parts = {name: package.joinpath(*path).read_text(encoding="utf-8") for name, path in PARTS.items()}
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(parts["html"]).render(css=Markup(parts["css"]), js=Markup(parts["js"]))


PARTS = {"html": ("serving", "page.html"), "js": ("serving", "page.js"), "css": ("reports", "page.css")}
