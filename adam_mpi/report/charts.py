"""Draw the pictures of the report, each as an `<img>` that contains its data."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    # Names of classes and runs are free text: a dollar in them starts no formula.
    "text.parse_math": False,
}
MAPS = 32
"""Channels of a layer that are drawn at most."""
UNITS = 100
"""Units of a dense layer in one line."""
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Name -> (x, y)."""


def draw_chart(alt: str, size: tuple[float, float], paint: Callable[[Figure], None], kind: str = "svg") -> str:
    """Return the `<img>` of a chart of `size` inches that `paint` draws."""
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    data = base64.b64encode(render(size, paint, kind)).decode()
    return f'<img alt="{escape(alt)}" src="data:{mime};base64,{data}">'


def render(size: tuple[float, float], paint: Callable[[Figure], None], kind: str) -> bytes:
    """Return a chart as a file of format `kind`, a figure of `size` inches that `paint` draws."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=110)
    return out.getvalue()


def lines(title: str, series: Series, x: str, y: str, log: bool = False, dots: Sequence[str] = ()) -> str:
    """Draw a chart with a curve for each of `series`; those in `dots` have a dot at each value."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for name, (xs, ys) in series.items():
            axes.plot(xs, ys, label=name, linewidth=1.4, marker="o" if name in dots else None, markersize=4)
        axes.set(title=title, xlabel=x, ylabel=y)
        if log and any(value > 0 for _, ys in series.values() for value in ys):
            axes.set_yscale("log")
            # The default ticks of such an axis are formulas.
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        axes.legend()

    return draw_chart(title, (5.2, 3.2), paint)


def bars(title: str, series: Mapping[str, Mapping[str, float]], y: str, stacked: bool = False) -> str:
    """Draw a chart with bars of the heights in `series`, by series and name, side by side or `stacked`."""
    names = list(dict.fromkeys(name for heights in series.values() for name in heights))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        width = 0.8 if stacked else 0.8 / max(len(series), 1)
        base = np.zeros(len(names))
        for index, (label, heights) in enumerate(series.items()):
            values = np.array([heights.get(name, 0.0) for name in names])
            shift = 0.0 if stacked else (index - (len(series) - 1) / 2) * width
            axes.bar(np.arange(len(names)) + shift, values, width, bottom=base if stacked else None, label=label)
            base = base + values
        _label_bars(axes, names)
        axes.set(title=title, ylabel=y)
        axes.margins(y=0.3)  # room for the legend
        axes.legend(loc="upper left", ncols=2, fontsize=8)

    return draw_chart(title, (5.2, 3.2), paint)


def _label_bars(axes: Axes, names: Sequence[str]) -> None:
    """Write names under the bars of a chart, as many as there is room for."""
    every = max(1, len(names) // 24)
    places = range(0, len(names), every)
    long = max((len(name) for name in names), default=0) * len(names) / every > 60
    axes.set_xticks(list(places), [names[place] for place in places], rotation=60 if long else 0)


def matrix(title: str, counts: np.ndarray, names: Sequence[str]) -> str:
    """Draw a confusion matrix: [class, predicted class] -> images; with numbers where there is room for them."""
    side = min(12.0, 2.0 + 0.38 * len(names))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.grid(visible=False)
        # Colors follow the root: else the diagonal would hide the errors.
        axes.imshow(np.sqrt(counts), cmap="Blues")
        axes.set(title=title, xlabel="predicted", ylabel="class")
        if len(names) > 30:
            axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
            return
        axes.set_xticks(range(len(names)), names, rotation=60 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, column in np.argwhere(counts > 0):
            dark = np.sqrt(counts[row, column]) > 0.5 * np.sqrt(counts.max())
            axes.text(
                column,
                row,
                f"{counts[row, column]}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )

    return draw_chart(title, (side, side), paint)


def gallery(title: str, images: np.ndarray, captions: Sequence[str], columns: int = 10) -> str:
    """Draw `images` (count, channels, rows, columns) for the report, each with a caption if there are `captions`."""
    rows = -(-len(images) // columns)

    def paint(figure: Figure) -> None:
        figure.suptitle(title, fontsize=10)
        for index, axes in enumerate(np.ravel(figure.subplots(rows, columns, squeeze=False))):
            axes.axis("off")
            if index < len(images):
                axes.imshow(picture(images[index]), cmap="gray", interpolation="nearest")
                axes.set_title(captions[index] if captions else "", fontsize=7)

    return draw_chart(title, (0.95 * columns, (1.15 if captions else 0.95) * rows + 0.4), paint, kind="png")


def activations(layers: Mapping[str, np.ndarray]) -> bytes:
    """Draw layer outputs as a PNG with a row for each layer: channels side by side, or units in lines."""

    def paint(figure: Figure) -> None:
        rows = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
        for axes, (name, channels) in zip(rows, layers.items(), strict=True):
            axes.imshow(_row_of_channels(channels.astype(np.float32)), cmap="viridis", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.set_ylabel(name, rotation=0, ha="right", va="center")

    return render((12.0, 0.95 * len(layers)), paint, "png")


def _row_of_channels(channels: np.ndarray) -> np.ndarray:
    """Return the channels of one layer to draw side by side, with a blank column between; units in lines."""
    if channels[0].size == 1:
        width = min(UNITS, len(channels))
        return np.append(channels, np.full(-len(channels) % width, np.nan)).reshape(-1, width)
    gap = np.full((channels.shape[1], 1), np.nan, np.float32)
    return np.hstack([piece for one in channels[:MAPS] for piece in (one, gap)][:-1])


def picture(image: np.ndarray) -> np.ndarray:
    """Return an image (channels, rows, columns) to draw: gray levels or colors from 0 to 1."""
    image = image.astype(np.float32)
    low = np.nanmin(image)
    high = np.nanmax(image)
    scaled = (image - low) / (high - low if high > low else 1)
    return np.moveaxis(scaled, 0, -1) if len(image) == 3 else scaled.mean(axis=0)
