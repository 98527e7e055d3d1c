"""A picture of one result: where the time goes, and how the publish stands beside the limit and other ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

__all__ = ["require_matplotlib", "write_plot"]


def require_matplotlib() -> None:
    """Raises `ConfigError` if matplotlib is missing: asked before minutes are spent measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ConfigError("--plot needs matplotlib: pip install 'weightsync[plot]'") from e


def write_plot(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a PNG of a result (`results.build`): phases on the left, whole transfers on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    phases = result["phases"]
    _bars(left, {name: row["seconds"] for name, row in phases.items()}, title="phases of a publish (they overlap)")
    summary = result["summary"]
    whole = {"publish": summary["publish_s"]}
    if summary["limit_s"]:
        whole["limit"] = summary["limit_s"]
    whole |= {row["name"]: {"median": row["median_s"], "p99": row["p99_s"]} for row in result["compare"]}
    _bars(right, whole, title=f"{_size(summary['unique_bytes'])} to every engine rank")
    figure.suptitle(result["title"])
    figure.savefig(path, dpi=130, format="png")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def _bars(axes: Any, rows: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    names = list(rows)
    medians = [rows[n]["median"] for n in names]
    above = [max(0.0, rows[n]["p99"] - rows[n]["median"]) for n in names]
    axes.barh(names, medians, xerr=[[0.0] * len(names), above], color="#4878a8", ecolor="#b04040", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("seconds: median, whisker to p99")
    axes.set_title(title, fontsize=10)
