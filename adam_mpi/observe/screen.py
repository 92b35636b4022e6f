"""What a terminal shows of a running job: a line for the run, a table by role, and one by rank."""

from typing import Any

from rich.table import Table
from rich.text import Text

from adam_mpi.plan import amount


def run_line(run: dict[str, Any]) -> Text:
    """Epoch, progress, loss, accuracy, speed, and when it will be done."""
    text = Text(f"{run['name']}  {run['share']:4.0%}", style="bold", no_wrap=True, overflow="ellipsis")
    for name, value in words(run).items():
        text.append(f"  {name} ", style="dim")
        text.append(value, style="not dim")
    return text


def words(run: dict[str, Any]) -> dict[str, str]:
    found = {
        "loss": f"{run['loss']:.4f}",
        "accuracy": f"{run['accuracy']:.4f}",
        "images/s": f"{run['images_per_second']:.0f}",
        "staleness": f"{run['staleness']:.2f}",
    }
    return found | ({"ETA": duration(run["eta"])} if run.get("eta") is not None else {})


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def by_role(groups: list[dict[str, Any]], staleness: float) -> Table:
    table = _table("role", "ranks", "busy", "waiting for", "queue", "staleness", "traffic")
    for group in groups:
        waited = f"{group['waiting']} {group['waited']:.0%}" if group["waiting"] else ""
        stale = "" if group["role"] == "data" else f"{staleness:.2f}"
        traffic = f"{amount(group['bytes'])}/s"
        table.add_row(
            group["role"], str(group["ranks"]), _busy(group["busy"]), waited, f"{group['queue']:g}", stale, traffic
        )
    return table


def by_rank(ranks: list[dict[str, Any]]) -> Table:
    table = _table("rank", "role", "host", "busy", "waiting for", "queue", "images/s", "traffic", "")
    for row in ranks:
        strip = "" if row["replica"] is None or row["role"] != "worker" else f" {row['replica']}.{row['strip']}"
        images = f"{row['images']:.0f}" if row["role"] == "worker" else ""
        notes = ["slow"] * row["slow"] + [f"silent for {row['silent']:.0f} s"] * (row["silent"] > 10)
        table.add_row(
            str(row["rank"]), row["role"] + strip, row["host"], _busy(row["busy"]), row["waiting"], str(row["queue"]),
            images, f"{amount(row['bytes'])}/s", Text(", ".join(notes), style="red"),
        )  # fmt: skip
    return table


def _busy(share: float) -> Text:
    return Text(f"{share:4.0%}", style="green" if share > 0.8 else "yellow" if share > 0.3 else "")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in ("ranks", "busy", "queue", "images/s") else "left")
    return table
