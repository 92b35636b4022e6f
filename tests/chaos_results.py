"""What came of chaos runs: a JSON line for each, kept in a file over several calls, and tables of them for the docs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from launch import ROOT

PAGE = ROOT / "docs" / "explanation" / "failures.md"
HOSTS = 3 if "ADAM_MPI_HOSTS" in os.environ else 1
TIMES = {"to_next_push": "to the next push", "to_all": "to all replicas"}


def read(path: Path | None) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def add(path: Path | None, line: dict) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def passed(lines: Sequence[dict], seed: int, kind: str, point: str) -> bool:
    """Whether the last time that such a run was played on these hosts it went well."""
    same = [line for line in lines if _name(line) == (HOSTS, kind, point, seed)]
    return bool(same) and "error" not in same[-1]


def _name(line: dict) -> tuple[int, str, str, int]:
    return line["hosts"], line["kind"], line["point"], line["seed"]


def newest(lines: Sequence[dict]) -> list[dict]:
    """Of each run the last one, in order."""
    return [line for _, line in sorted({_name(line): line for line in lines}.items())]


def summary(lines: Sequence[dict]) -> str:
    """Medians and worst, and how many failed; a JSON line each."""
    lines = newest(lines)
    said = [{"name": key, **_spread(_all(lines, key))} for key in TIMES]
    said.append({"runs": len(lines), "failed": sum("error" in line for line in lines)})
    return "\n".join(json.dumps(line) for line in said)


def _all(lines: Sequence[dict], key: str) -> list[float]:
    return [seconds for line in lines for seconds in line.get(key, ())]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(seconds), 3), "worst": max(seconds), "count": len(seconds)} if seconds else {}


def tables(lines: Sequence[dict]) -> dict[str, str]:
    """Section of the page -> its tables, of those that there are runs for.

    Training runs one by one, and a line for all runs of a point; wide runs likewise; the marathon's figures.
    """
    lines = newest(lines)
    marathons = [line for line in lines if line["kind"] == "marathon"]
    wide = [line for line in lines if line["point"] == "wide"]
    others = [line for line in lines if line not in marathons and line not in wide]
    header = ["run", "ranks", "killed, after images", "outcome", *(f"{text}, s" for text in TIMES.values())]
    training = [header, ["---"] * len(header), *(_row(line) for line in others if not line["point"])]
    made = {"chaos": [training, _groups(others)], "wide": [_wide(wide), _groups(wide)]}
    made |= {"marathon": [_marathon(line) for line in marathons[-1:]]}
    there = {"chaos": others, "wide": wide, "marathon": marathons}
    return {name: "\n".join(map(_lines, parts)) for name, parts in made.items() if there[name]}


def _wide(lines: Sequence[dict]) -> list[list[str]]:
    """Runs over codecs, servers and staleness, one by one."""
    rows = [["seed", "codec", "servers, copies", "staleness", "killed", "outcome"], ["---"] * 6]
    for line in lines:
        killed = "; ".join(strike.removeprefix("kill ") for strike in line["strikes"])
        sizes, outcome = f"{line['servers']}, {line['copies']}", line.get("outcome", "failed")
        rows.append([str(line["seed"]), line["codec"], sizes, line["staleness"], killed, outcome])
    return rows


def _marathon(line: dict) -> list[list[str]]:
    """What ranks of each role had at the most after the tenth kill, and in the end."""
    name = f"{line.get('kills', 0)} kills, {line.get('killed', 0)} ranks, {line.get('generations', 0)} generations"
    rows = [[name if "error" not in line else "failed", "after kill 10", "in the end"], ["---"] * 3]
    for what, told in line.get("figures", {}).items():
        megabytes = what.endswith((" rss", " shared"))
        rows.append([what, *(f"{told[key] >> 20} MB" if megabytes else str(told[key]) for key in ("first", "last"))])
    return rows


def _row(line: dict) -> list[str]:
    name = f"{line['seed']} {line['kind']}{' on 3 hosts' if line['hosts'] > 1 else ''}"
    if "error" in line:
        return [name, "", "", "failed", "", ""]
    kills = ", ".join(f"{role} {place} ({images})" for role, place, images in line["kills"])
    outcome = f"accuracy {line['accuracy']:.3f}"
    if "distance" in line:
        outcome = f"{line['distance']:.0e} from undisturbed"
    return [name, str(line["ranks"]), kills, outcome, *(" ".join(f"{s:.2f}" for s in line[key]) for key in TIMES)]


def _groups(lines: Sequence[dict]) -> list[list[str]]:
    """Training runs and those of each point: how many went well, and how long pushes stopped."""
    groups: dict[str, list[dict]] = {}
    for line in lines:
        what = f"killed at `{line['point']}`" if line["point"] else "training"
        what = "codecs, servers, staleness" if line["point"] == "wide" else what
        groups.setdefault(f"{what}{', 3 hosts' if line['hosts'] > 1 else ''}", []).append(line)
    rows = [["runs", "passed", *(f"{text}, s: median, worst" for text in TIMES.values())], ["---"] * 4]
    for what, those in groups.items():
        spreads = [_spread(_all(those, key)) for key in TIMES]
        told = [f"{spread['median']:.2f}, {spread['worst']:.2f}" if spread else "" for spread in spreads]
        rows.append([what, f"{sum('error' not in line for line in those)} of {len(those)}", *told])
    return rows


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write(lines: Sequence[dict]) -> None:
    """Put the tables into the page; those of runs that are not among these stay as they are."""
    page = PAGE.read_text()
    for name, text in tables(lines).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    PAGE.write_text(page)
