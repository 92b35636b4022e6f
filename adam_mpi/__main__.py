"""Run the command line of `adam_mpi.cli`, as `python -m adam_mpi`."""

import signal
import sys

# The signal asks for a snapshot as soon as there is something to keep; until then it must not end the rank.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)

from adam_mpi.cli import main  # noqa: E402

sys.exit(main())
