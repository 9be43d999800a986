"""Build plots as plain dicts that plotly.js draws (plotly.com/javascript/reference)."""

from itertools import cycle
from typing import Any, NamedTuple

COLORS = ("#4269d0", "#ff725c", "#3ca951", "#e5a50a", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0")
DASHES = ("solid", "dash", "dot", "dashdot")


class Figure(NamedTuple):
    """A plot, or the reason why there is none."""

    id: str
    title: str
    about: str
    """Meaning of colors, marks and dashes."""
    traces: list[dict]
    layout: dict[str, Any]
    missing: str = ""
    """Data that the plot needs; shown if there are no traces."""


def plot_layout(log: bool) -> dict[str, Any]:
    """Return plotly's layout of every plot; `log`: its y axis is logarithmic."""
    axis = {"gridcolor": "#e8e8e8", "linecolor": "#999999", "zeroline": False}
    return {
        "margin": {"l": 68, "r": 12, "t": 8, "b": 44},
        "font": {"family": "inherit", "size": 12, "color": "#333333"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "hoverlabel": {"font": {"size": 12}},
        "xaxis": {**axis, "title": {"standoff": 8}},
        "yaxis": {**axis, "type": "log", "tickformat": "~g"} if log else {**axis, "type": "linear"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}, "tracegroupgap": 0},
        "uirevision": "kept",  # zoom and hidden lines stay when --follow draws the page again
    }


def stacked_bars(names: list[str], parts: dict[str, list], hover: str) -> tuple[list[dict], dict[str, Any]]:
    """Return the traces and the layout of a horizontal bar for each name, made of `parts`: a value for each name."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": names,
            "x": values,
            "marker": {"color": color},
            "hovertemplate": hover,
        }
        for (part, values), color in zip(parts.items(), cycle(COLORS))
    ]
    layout = plot_layout(False) | {"barmode": "stack", "hovermode": "closest", "showlegend": True}
    layout["yaxis"] |= {"type": "category", "automargin": True}
    return traces, layout


def short(values: list[float]) -> list[float]:
    """Return each value with six digits, which halves the page's size without a visible change."""
    return [float(f"{value:.6g}") for value in values]
