"""Ready configurations, one TOML file each: their names stand wherever a configuration is given."""

from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def listing() -> str:
    """A line for each: its name and what it is."""
    rows = {name: (FOLDER / f"{name}.toml").read_text().splitlines()[0].removeprefix("# ") for name in names()}
    return "\n".join(f"{name:14} {sentence}" for name, sentence in rows.items())


def find(given: str | Path) -> Path:
    """The file of a ready configuration, or what was given."""
    return FOLDER / f"{given}.toml" if str(given) in names() and not Path(given).is_file() else Path(given)
