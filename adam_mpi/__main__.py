"""python -m adam_mpi: see cli.py for the commands."""

import sys

from adam_mpi.cli import main

sys.exit(main())
