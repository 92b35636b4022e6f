"""How a spare joins a running job: it gets ready alone, stands by until ranks are missing, and joins or ends."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import layout, spares
from adam_mpi.cluster.layout import NEW
from adam_mpi.cluster.world import World
from adam_mpi.data.sets import DataSet, open_set
from adam_mpi.model.partition import partition
from adam_mpi.runtime import compile, ending
from adam_mpi.runtime.job import Job


@dataclass(frozen=True)
class Joined:
    """What a spare has when it joins: the world of its first generation, the job, and its data set."""

    world: World
    job: Job
    data: DataSet


def wait_to_join(directory: Path) -> Joined:
    """Get this spare ready for the job in `directory` and wait until the job needs it; else end the process."""
    parent = spares.return_errors(MPI.Comm.Get_parent())
    try:
        return _stand_by(parent, directory)
    except Exception as error:
        # A lost rank is known to the others; any other error is a fault of the program.
        if not isinstance(error, RankFailure | MPI.Exception):
            traceback.print_exc()
            sys.stderr.flush()
        # Only a death reaches ranks that wait for this one inside MPI.
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def _stand_by(parent: MPI.Intercomm, directory: Path) -> Joined:
    """Do all that a spare can do alone before others wait for it, then join when it is invited."""
    over = partial(ending.is_over, directory)
    parent.send((MPI.Get_processor_name(), os.getpid()), 0)
    package = spares.receive(parent, over)
    data = _get_ready(package.job, package.captured)
    parent.send(time.process_time(), 0)
    invitation = spares.receive(parent, over)
    if invitation is None:
        parent.send(None, 0)
        _leave(parent)
    comm = spares.join_job(invitation)
    world = World(comm, package.job.config, joining=layout.Place(NEW, "", (), member_id=invitation.member))
    world.agree()
    world.full = invitation.full
    world.lost = invitation.lost
    return Joined(world, package.job, data)


def _get_ready(job: Job, captured: Sequence[str]) -> DataSet:
    """Get a spare ready: load the kernels of all roles and open the data; layers of `captured` push factors."""
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    for strip in cut.strips if len(cut) > 1 else (None,):
        compile.compile_now(["worker", "server"], compile.make_network(job, strip, captured))
    return open_set(job.config.data)


def _leave(parent: MPI.Intercomm) -> NoReturn:
    """End a spare that the job has not needed."""
    with ending.at_most(ending.LEAVE_SECONDS):
        parent.Disconnect()
        MPI.Finalize()
    os._exit(0)
