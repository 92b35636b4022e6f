"""One instruction that numba does not offer: `acquire()` keeps later reads behind earlier ones, for every CPU.

x86 never swaps two reads, so there it is only a word to the compiler; ARM and POWER do, and wait here.
"""

from typing import Any

from numba import types

from adam_mpi.model.engine.vector import define


def _acquire(builder: Any) -> None:
    builder.fence("acquire")


acquire = define(_acquire, types.void)
