"""The paper's figures and those around them: for each the data as JSON, and a plot."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import _others
import _results
from _others import others
from _results import Clock, Results, heading, table
from _study import Scale
from _training import Training

from adam_mpi.base.errors import UserError
from adam_mpi.base.machine import host_provenance
from adam_mpi.report import charts

STUDIES = (
    "threads",
    "server",
    "strips",
    "replicas",
    "traffic",
    "quorum",
    "sizes",
    "staleness",
    "grid",
    "codecs",
    "skew",
    "noise",
    "simulation",
    "clusters",
)
SIZE = 6.4, 3.8


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("only", nargs="*", metavar="FIGURE", help=f"of {', '.join(STUDIES)} (all)")
    parser.add_argument("--epochs", type=int, help="of each job, instead of the figure's own number; needs -o")
    parser.add_argument("--seeds", type=int, default=3, help="of each accuracy (3)")
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    if unknown := set(options.only) - set(STUDIES):
        raise UserError(f"figures {' '.join(sorted(unknown))}: unknown; there are {', '.join(STUDIES)}")
    kept = _results.results(options, "figures", changed=bool(options.epochs))
    clock = Clock.of(options)
    scale = Scale(Training(options.folder, clock), options.seeds, options.epochs, tuple(options.set))
    for name in options.only or STUDIES:
        for line in _measure(name, study(name), kept, scale):
            yield f"{name}: {line}"
            if clock.over:
                return


def study(name: str) -> ModuleType:
    """A module with TITLE, KIND, PAPER, points(scale), paint(axes, points) and verdict(points)."""
    return importlib.import_module(f"studies.{name}")


def _measure(name: str, module: ModuleType, kept: Results, scale: Scale) -> Iterator[str]:
    """Every point is kept and drawn as soon as it is there."""
    found, plot = kept.read(name).get("points", {}), kept.folder / f"{name}.svg"
    if found and not plot.exists():
        draw(plot, module, found)
    for point, measure in module.points(scale).items():
        if point in found:
            continue
        share = others()
        result = None if scale.training.clock.over else measure()
        if result is None:
            yield "time is up; the same command goes on"
            return
        found[point] = {"others": share()} | result
        kept.keep(name, {"title": module.TITLE, "kind": module.KIND, "machine": host_provenance(), "points": found})
        draw(plot, module, found)
        yield f"{point}: {shown(result)}"


def draw(file: Path, module: ModuleType, points: dict[str, dict[str, Any]]) -> None:
    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.set_title(f"{module.TITLE} ({module.KIND})")
        module.paint(axes, points)

    file.write_bytes(charts.render(SIZE, paint, "svg"))


def shown(result: dict[str, Any]) -> str:
    """Its numbers, in a line."""
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())


def page(folder: Path) -> Iterator[str]:
    kept = Results(folder / "figures")
    for name in STUDIES:
        module = study(name)
        told = kept.read(name)
        yield from heading(module.TITLE, f"figures {name}")
        if not told:
            yield f"Not run yet. {module.PAPER}"
            yield ""
            continue
        points = told["points"]
        yield f"![{module.TITLE}](../results/figures/{name}.svg)"
        yield ""
        yield from table(module.table(points))
        if hasattr(module, "differences"):
            yield from table([["difference of accuracies", "%", "95 % interval, %", "by"], *module.differences(points)])
        yield f"{module.PAPER} {module.verdict(points)}"
        yield ""


def provenance(folder: Path) -> Iterator[list[str]]:
    """Yield a row about where each figure comes from."""
    kept = Results(folder / "figures")
    for name in STUDIES:
        if told := kept.read(name):
            where = told["machine"]
            shares = [point.get("others") for point in told["points"].values()]
            yield [
                study(name).TITLE,
                told["kind"],
                where["commit"],
                f"{where['cores']} x {where['cpu']}",
                _others.told(shares),
            ]
