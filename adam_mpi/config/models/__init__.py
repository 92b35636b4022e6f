"""The ready configurations, one TOML file each; a name is accepted wherever a configuration is."""

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the ready configurations, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def listing() -> str:
    """Return a line for each ready configuration: its name and its description."""
    rows = {name: (FOLDER / f"{name}.toml").read_text().splitlines()[0].removeprefix("# ") for name in names()}
    return "\n".join(f"{name:14} {sentence}" for name, sentence in rows.items())


def find(given: str | Path) -> Path:
    """Return the file of the ready configuration `given`, or `given` itself where it is a file or no such name."""
    return FOLDER / f"{given}.toml" if str(given) in names() and not Path(given).is_file() else Path(given)
