"""``methods``: what attentions can become."""

from __future__ import annotations

import click

from subquad.commands.frame import load_pipeline, print_json
from subquad.commands.options import common_options


@click.command(
    epilog="""\b
Examples:
  subquad methods
  subquad methods --markdown > docs/methods.md
"""
)
@click.option("--markdown", is_flag=True, help="Everything about them, as one page.")
@common_options
def methods(markdown: bool, as_json: bool) -> None:
    """List the replacement methods and their parameters."""
    load_pipeline()  # says which extra is missing
    from subquad.passes.methods import METHODS, method_text
    from subquad.passes.methods.page import example, methods_page

    if markdown:
        click.echo(methods_page(), nl=False)
        return
    found = [
        {"name": m.name, "example": method_text(m, example(m)), "paper": m.paper} for m in METHODS
    ]
    if as_json:
        print_json({"methods": found})
        return
    for method in found:
        click.echo(f"{method['example']}  ({method['paper']})")
