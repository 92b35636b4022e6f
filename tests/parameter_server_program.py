"""A program that uses `ParameterServer`, for tests/test_parameter_server_jobs.py: the argument is a scenario.

Two ranks are clients, the others serve. Every client pushes ROUNDS times in three ways, checks that all of it was
applied exactly once, and prints the result; a scenario determines which rank fails meanwhile, and how.
"""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.server.session import ServerSession

SIZE, CLIENTS, ROUNDS = 4000, 2, 60
COUNTER = SIZE - 1
"""The parameter that counts the clients that are done."""
CHOSEN = np.array([7, 130, 131, 3000])


def push(server: ParameterServer, rounds: int) -> None:
    for number in range(rounds):
        server.push(np.ones(COUNTER, np.float32))
        server.push(np.full(50, 2, np.float32), offset=100)
        last = server.push(np.full(4, 4, np.float32), indices=CHOSEN)
        if number % 10 == 9:
            server.wait(last)
            server.wait(server.pull(indices=CHOSEN[::-1]))
            server.wait(server.pull(offset=50, count=500))


def check(server: ParameterServer, clients: int, optimizer: str) -> None:
    """Wait for the other clients, through a parameter that counts them; then all pushes must be applied."""
    server.wait(server.push(np.ones(1, np.float32), offset=COUNTER))
    while abs(server.wait(server.pull(offset=COUNTER))[0]) < clients:
        pass
    wanted = np.full(COUNTER, ROUNDS * CLIENTS, np.float32)
    wanted[100:150] += 2 * ROUNDS * CLIENTS
    wanted[CHOSEN] += 4 * ROUNDS * CLIENTS
    found = server.wait(server.pull(count=COUNTER))
    right = np.array_equal(found, wanted if optimizer == "additive" else -wanted)
    report(f"client {server.world.place.member} {'right' if right else 'WRONG'} generation {server.world.generation}")


def report(text: str) -> None:
    print(text, flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(server: ParameterServer, folded: int) -> None:
    """Kill this server when it has applied `folded` messages, before it acknowledges the last of them."""
    role = server.server
    apply = ServerSession._apply

    def applying(session, ready) -> None:
        apply(session, ready)
        if role.counts["folded"] >= folded:
            die()

    # Of all generations: each has a session of its own.
    ServerSession._apply = applying


def main() -> None:
    scenario = sys.argv[1]
    rank = MPI.COMM_WORLD.rank
    copies, servers = (1, 2) if scenario in ("alone", "raise", "exit", "with") else (2, 3)
    optimizer = "descent" if scenario == "two servers" else "additive"
    server = ParameterServer(MPI.COMM_WORLD, SIZE, servers, shard=256, copies=copies, optimizer=optimizer, seconds=30.0)
    doomed = {"server": {3: 40}, "two servers": {4: 30, 2: 200}, "alone": {2: 40}}.get(scenario, {})
    if rank in doomed:
        kill_after(server, doomed[rank])
    if scenario == "with":
        with server:
            if not server.serve():
                push(server, 3)
                if rank == 0:
                    raise ValueError("the client's own mistake")
        return
    if not server.serve():
        push(server, ROUNDS)
        if scenario == "raise" and rank == 0:
            raise ValueError("the client's own mistake")
        if scenario == "exit" and rank == 0:
            sys.exit(0)
        if scenario == "client" and rank == 1:
            server.wait(server.push(np.ones(1, np.float32), offset=COUNTER))
            while not server.idle:
                server.step()
            die()
        while scenario == "client" and server.world.generation == 0:
            server.step()
        check(server, CLIENTS, optimizer)
    server.close()
    report(f"closed {rank}")


if __name__ == "__main__":
    main()
