"""The results as pictures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .measurements import contention, cycle, handover, idle, stampede
from .results import OURS, Result

__all__ = ["draw"]

OUR_COLOUR, PEER_COLOURS = (
    "#c0392b",
    ("#34495e", "#7f8c8d", "#2980b9", "#8e44ad", "#16a085", "#d4ac0d"),
)

mpl.use("svg")
mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # Text stays text: small files, and it can be searched.
        "svg.hashsalt": "django_redis_lock",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "figure.dpi": 100,
    }
)


def draw(results: Mapping[str, Sequence[Result]], folder: Path) -> list[Path]:
    """Draw what was measured; gives the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    locks = [
        (name, column, heading)
        for name, column, heading in (
            ("cycle", cycle.RATIO, "Alone: cost in bare round trips\n(less is better)"),
            (
                "contention",
                contention.PASSED,
                "2 processes, no hold: passed on\ntimes per second (more is better)",
            ),
            ("handover", handover.P99, "8 processes, 2 ms hold:\nwait p99 in ms (less is better)"),
            ("idle", idle.PROCESSES, "8 processes wait:\ncommands/s (less is better)"),
        )
        if name in results
    ]
    if locks:
        figure, axes = plt.subplots(1, len(locks), figsize=(3.1 * len(locks), 2.3), squeeze=False)
        for axis, (name, column, heading) in zip(axes[0], locks, strict=True):
            _bars(axis, results[name][0], column, heading)
        drawn.append(_save(figure, folder / "benchmark_locks.svg"))
    sizes = [result for result in results.get("stampede", ()) if stampede.LAST in result.columns]
    if sizes:
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
        _lines(axes[0], sizes, stampede.LAST, "Last follower has the value after … ms")
        _lines(axes[1], sizes, stampede.OPENED, "Connections of each process")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        drawn.append(_save(figure, folder / "benchmark_stampede.svg"))
    return drawn


def _bars(axis: Axes, result: Result, column: str, heading: str) -> None:
    """A bar for each contender; on a logarithmic scale where they are far apart."""
    numbers = {name: result.number(name, column) for name in result.rows}
    shown = {name: number for name, number in numbers.items() if number is not None}
    names = [name for name in reversed(shown) if name != OURS]
    names.append(OURS)
    values = [shown[name] for name in names]
    colours = [OUR_COLOUR if name == OURS else PEER_COLOURS[1] for name in names]
    bars = axis.barh(names, values, color=colours, height=0.65)
    axis.bar_label(
        bars,
        labels=[f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values],
        padding=3,
    )
    if max(values) > 20 * min(values) > 0:
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 3, max(values) * 8)
    else:
        axis.set_xlim(0, max(values) * 1.3)
    axis.set_title(heading)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _lines(axis: Axes, results: Sequence[Result], column: str, heading: str) -> None:
    """A line for each contender over the number of callers; only where all were served."""
    peers = iter(PEER_COLOURS)
    for name in results[0].rows:
        colour = OUR_COLOUR if name == OURS else next(peers)
        points = [
            (stampede.callers_of(result), value)
            for result in results
            if (value := result.number(name, column)) is not None and stampede.whole(result, name)
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                color=colour,
                label=name,
                linewidth=2.2 if name == OURS else 1.2,
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [stampede.callers_of(result) for result in results]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_xlabel("callers in 4 processes")
    axis.set_title(heading)
    axis.grid(axis="y", alpha=0.3)


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.set_layout_engine("constrained")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
