"""python -m adam_mpi: see cli.py for the commands."""

import signal
import sys

# It asks for a snapshot once there is something to keep; until then it must not end the rank.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

from adam_mpi.cli import main  # noqa: E402

sys.exit(main())
