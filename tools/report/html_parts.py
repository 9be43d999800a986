"""Build the parts of HTML pages with plots: a self-contained document, tables, texts to open, plots."""

import json
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

FOLDER = Path(__file__).parent


def document(title: str, made: str, body: str, script: str) -> str:
    """Return a page that fetches nothing. `made`, `body` and `script` are HTML and JavaScript, `title` is text."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><link rel="icon" href="data:,">
<style>{(FOLDER / "page.css").read_text()}</style>
<script>{get_plotlyjs()}</script></head>
<body><h1>{escape(title)}</h1><p class="muted" id="made">{made}</p>
{body}
<script>{script}</script></body></html>
"""


def in_script(data: Any) -> str:
    """Return data as JavaScript; no text in it ends the script."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def place(figure: dict[str, Any]) -> str:
    """Return the element that the page draws a figure in. It grows with the legend, so that the plot keeps its size."""
    names = figure["layout"]["showlegend"] and sum(trace.get("showlegend", True) for trace in figure["traces"])
    return (
        f"<section{' class=wide' * (figure['id'] == 'loss')}><h3>{escape(figure['title'])} "
        f"<span>{escape(figure['about'])}</span></h3>"
        f'<div class="plot" id="{figure["id"]}" style="--names: {int(names)}"></div></section>'
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table; without a head if all its cells are empty."""
    cells = lambda kind, row: "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def details(summary: str, content: str, id: str, opened: bool = False) -> str:
    """Return HTML `content` that a click on the text `summary` shows."""
    return f'<details id="{escape(id)}"{" open" * opened}><summary>{escape(summary)}</summary>{content}</details>'
