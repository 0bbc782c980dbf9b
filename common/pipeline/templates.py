"""Text files made from jinja2 templates."""

from functools import cache
from pathlib import Path


def render(template: Path, **values) -> str:
    """Fill in a template; in a `.html.jinja` file every value is escaped. A name without a value is an error."""
    return _load(template).render(values)


@cache
def _load(template: Path):
    """The compiled jinja2 template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=template.name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name)
