"""The configuration: typed sections (`sections.py`), read from TOML, dicts and `--set` (`reading.py`)."""

from adam_mpi.config.reading import Given as Given
from adam_mpi.config.reading import documentation as documentation
from adam_mpi.config.reading import from_toml as from_toml
from adam_mpi.config.reading import load as load
from adam_mpi.config.reading import to_toml as to_toml
from adam_mpi.config.sections import *  # noqa: F403
