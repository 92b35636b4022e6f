"""`ParameterServer`, the public class of the library: push and pull parts of a float32 vector that servers hold."""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.idle import Idle
from adam_mpi.cluster.world import World
from adam_mpi.parameter_server import arguments, shutdown
from adam_mpi.parameter_server.client import Client, Filter
from adam_mpi.parameter_server.handles import Handle, V
from adam_mpi.parameter_server.membership import Membership, arrange_roles


class ParameterServer(Membership):
    """A vector of `size` float32 parameters on the last `servers` ranks of a communicator.

    The other ranks are clients: they push values, which the servers add or step by, and pull parameters. With one
    rank, that rank is both. Making one is collective over `comm`, and so is `close` (the end of a ``with`` block).

    `push` and `pull` return a `Handle` at once; transfers progress inside of `step`, `wait` and `close`. The handles
    in `after` must be done before a push or pull starts: sequential consistency is ``after=[the last]``, bounded delay
    ``after=[the one k before]``, eventual consistency no `after` at all.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks of the program that take part.
    size : int
        Number of parameters.
    servers : int, default 1
        Number of ranks, the last ones of `comm`, that serve. At least one rank remains a client.
    optimizer : str, default "additive"
        What a server does with a push: add it ("additive"), or take it for a gradient and step by "descent",
        "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw" or "ftrl".
    learning_rate : float, default 1.0
        Step size of all rules but "additive".
    settings : mapping of str to float, optional
        Other numbers of the rule by their names in `[optimizer]`: momentum, decay, beta1, beta2, epsilon, l1.
    initial : array_like of float32, optional
        First values of the parameters, the same on all ranks; zeros by default.
    filter : callable, optional
        Takes indices and values of a push, and returns a mask of those to send now; the others are added to the next
        push. See `significant`.
    shard : int, default 262144
        Parameters of a shard, the unit that is placed on servers and copied.
    transport : {"shared", "rma", "send"}, default "shared"
        How bytes travel: through shared memory inside a host and MPI windows between hosts, through MPI windows
        everywhere, or as MPI messages.
    copies : int, default 1
        Servers that hold each shard. A push is done when all of them have it.
    threads : int, default 1
        Threads with which each server applies pushes.
    seconds : float, default 60.0
        Longest time that a rank waits for others.

    Raises
    ------
    UserError
        If an argument is not possible, or the calling thread is not the main thread.

    Notes
    -----
    Each push is one step of the parameters that it names, with their state; all others stay as they are. Bias
    corrections of "adam" and "adamw" count the pushes of a shard.

    All methods belong to the main thread. An exception that nobody catches while a server is open ends the job on all
    ranks, and so does an exit without `close`: the other ranks would wait for ever.

    Under Open MPI's ``mpirun --with-ft ulfm`` the job survives a lost rank: with several `copies` another server takes
    over, and pushes that were not acknowledged are sent again under their old numbers, so that each is applied once.
    The ranks that are left agree on a new membership inside of `step`, `wait`, `serve` and `close`; a client that calls
    none of them for `seconds` ends the job. Such a program ends without ``MPI_Finalize``, which would wait for the
    dead.

    Examples
    --------
    Run it with any number of ranks, for example ``mpirun -n 3 python program.py``:

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from adam_mpi import ParameterServer
    >>> with ParameterServer(MPI.COMM_WORLD, size=4) as server:
    ...     if not server.serve():
    ...         pushed = server.push(np.ones(2, np.float32), offset=1)
    ...         print(server.wait(server.pull(after=[pushed])))
    [0. 1. 1. 0.]
    """

    def __init__(
        self,
        comm: MPI.Comm,
        size: int,
        servers: int = 1,
        optimizer: str = "additive",
        learning_rate: float = 1.0,
        settings: Mapping[str, float] = MappingProxyType({}),
        initial: ArrayLike | None = None,
        filter: Filter | None = None,
        shard: int = 262_144,
        transport: str = "shared",
        copies: int = 1,
        threads: int = 1,
        seconds: float = 60.0,
    ) -> None:
        _check_thread("made")
        arguments.check_counts(
            size=size,
            servers=servers,
            ranks=comm.size,
            shard=shard,
            copies=copies,
            threads=threads,
            seconds=seconds,
        )
        config = arguments.to_config(
            optimizer=optimizer,
            learning_rate=learning_rate,
            settings=settings,
            shard=shard,
            transport=transport,
            copies=copies,
            threads=threads,
            seconds=seconds,
        )
        weights = np.zeros(size, np.float32) if initial is None else arguments.to_float32(initial, "initial values")
        if weights.size != size:
            raise UserError(f"initial has {weights.size} values: must have size = {size}")
        super().__init__(size, seconds, Client(size, filter))
        self._open_generation(World(comm, config, lambda hosts, _: arrange_roles(hosts, servers)))
        if self.server is not None:
            self.server.start({"weights": weights})
        self._meet_members("all ranks to start")
        self.world.started = True
        shutdown.register(self)

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the parameter server; after an exception end the job, as other ranks would wait for this one."""
        if error is None:
            self.close()
        elif self.world.comm.size > 1:
            shutdown.end_job(self.world, error)
        else:
            self._free_windows()

    def serve(self) -> bool:
        """Serve until every client has closed, on a server rank; return at once on a client.

        Returns
        -------
        bool
            True on a server rank, when all clients have closed; False on a client, which then does its work.

        Raises
        ------
        UserError
            If the calling thread is not the main thread.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer
        >>> with ParameterServer(MPI.COMM_SELF, size=1) as server:
        ...     server.serve()
        False
        """
        _check_thread()
        if self.client:
            return False
        idle = Idle("sleep")
        while not all(self.world.layout.places[rank].member in self.left for rank in self.world.layout.workers):
            idle.back_off(self._survive_loss(self._step))
        return True

    def push(
        self,
        values: ArrayLike,
        offset: int = 0,
        indices: ArrayLike | None = None,
        after: Sequence[Handle[Any]] = (),
    ) -> Handle[None]:
        """Push values to the parameter server for parameters `offset`, `offset + 1`, ... or for those at `indices`.

        Parameters
        ----------
        values : array_like of float32
            One dimension. The array must not be changed before the handle is done.
        offset : int, default 0
            The parameter that the first value is for.
        indices : array_like of int, optional
            The parameter that each value is for, instead of a range. Values of an index that occurs twice are summed.
        after : sequence of Handle, optional
            Handles that must be done before the push starts.

        Returns
        -------
        Handle
            Done when all copies have applied the push. A message with a NaN or an infinity is not applied: `refused`
            of the handle says so, and `wait` raises it.

        Raises
        ------
        UserError
            If the values would have to be rounded to float32, or a parameter does not exist. Nothing is sent then.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer
        >>> with ParameterServer(MPI.COMM_SELF, size=5) as server:
        ...     pushed = server.push(np.array([1, 2, 4], np.float32), indices=[4, 0, 4])
        ...     print(server.wait(server.pull(after=[pushed])))
        [2. 0. 0. 0. 5.]
        """
        _check_thread()
        given = arguments.to_float32(values, "values")
        if indices is not None:
            chosen = arguments.to_indices(indices, self.size, given.size)
            return self._begin(self._client.push_pairs(*arguments.sum_duplicates(chosen, given), after))
        offset, count = arguments.check_range(offset, given.size, self.size)
        if self._client.keep is not None:
            return self._begin(self._client.push_pairs(np.arange(offset, offset + count), given, after))
        return self._begin(self._client.push_range(given, offset, after))

    def pull(
        self,
        offset: int = 0,
        count: int | None = None,
        indices: ArrayLike | None = None,
        after: Sequence[Handle[Any]] = (),
        into: np.ndarray | None = None,
    ) -> Handle[np.ndarray]:
        """Read parameters from the parameter server: a range, or those at `indices`.

        Parameters
        ----------
        offset : int, default 0
            The first parameter of the range.
        count : int, optional
            Length of the range; by default it ends with the last parameter.
        indices : array_like of int, optional
            The parameters to read, in this order, instead of a range.
        after : sequence of Handle, optional
            Handles that must be done before the pull starts.
        into : numpy.ndarray of float32, optional
            Contiguous array to read into; by default a new one.

        Returns
        -------
        Handle
            Done when its `values` are complete; `wait` returns them.

        Raises
        ------
        UserError
            If a parameter does not exist, or `into` does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer
        >>> first = np.arange(5, dtype=np.float32)
        >>> with ParameterServer(MPI.COMM_SELF, size=5, initial=first) as server:
        ...     print(server.wait(server.pull(offset=1, count=2)))
        ...     print(server.wait(server.pull(indices=[4, 0])))
        [1. 2.]
        [4. 0.]
        """
        _check_thread()
        if indices is not None:
            chosen = arguments.to_indices(indices, self.size)
            _check_into(into, chosen.size)
            return self._begin(self._client.pull_indices(chosen, into, after))
        offset, count = arguments.check_range(offset, self.size - offset if count is None else count, self.size)
        _check_into(into, count)
        return self._begin(self._client.pull_range(offset, count, into, after))

    def wait(self, handle: Handle[V]) -> V:
        """Wait until the parameter server has done `handle`, and return what a pull has read.

        Parameters
        ----------
        handle : Handle
            A push or a pull of this server.

        Returns
        -------
        numpy.ndarray or None
            The parameters that a pull has read; None for a push.

        Raises
        ------
        UserError
            If a part of a push was refused, because it has a NaN or an infinity.
        Stall
            If it takes longer than `seconds`.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer, UserError
        >>> with ParameterServer(MPI.COMM_SELF, size=2) as server:
        ...     try:
        ...         server.wait(server.push(np.array([1, np.nan], np.float32)))
        ...     except UserError as error:
        ...         print(error)
        push of 2 parameters from 0: NaN or infinity at parameter 1; nothing of 0 to 1 was applied
        """
        _check_thread()
        self._survive_loss(lambda: self._step_until(lambda: handle.done, handle.what))
        if handle.refused:
            raise UserError(handle.refused)
        return cast(V, handle.values)

    def step(self) -> bool:
        """Make progress with the pushes and pulls of the library, without waiting.

        Returns
        -------
        bool
            Always True, so that it can stand in the condition of a loop.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer
        >>> with ParameterServer(MPI.COMM_SELF, size=2) as server:
        ...     handle = server.push(np.ones(2, np.float32))
        ...     while server.step() and not handle.done:
        ...         pass  # compute something else
        """
        _check_thread()
        self._survive_loss(self._step)
        return True

    def close(self) -> None:
        """Complete all pushes and pulls, end the parameter server's `serve`, and free its memory; collective.

        A ``with`` block calls it at its end.

        Raises
        ------
        Stall
            If other ranks do not close within `seconds`.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> from adam_mpi import ParameterServer
        >>> server = ParameterServer(MPI.COMM_SELF, size=2)
        >>> server.close()
        """
        _check_thread()
        self._survive_loss(self._leave)
        self._free_windows()

    @property
    def idle(self) -> bool:
        """Return whether every push and pull of this rank to the parameter server is done."""
        return self._client.idle

    def _begin(self, handle: Handle[V]) -> Handle[V]:
        """Start the push or pull of `handle` now, or as soon as those before it are done; return it."""
        if not self._survive_loss(partial(self._client.start_ready, handle)):
            self._client.waiting.append(handle)
        return handle


def _check_thread(what: str = "used") -> None:
    """Raise UserError unless the thread that calls the parameter server is the main thread."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise UserError(f"{what} in thread {thread.name}: it belongs to the main thread")


def _check_into(into: np.ndarray | None, count: int) -> None:
    """Raise UserError unless `count` parameters of a pull can be read into `into`."""
    if into is not None and (into.dtype != np.float32 or into.shape != (count,) or not into.flags.c_contiguous):
        raise UserError(f"into: {into.dtype} of shape {into.shape}: must be {count} float32 without gaps")
