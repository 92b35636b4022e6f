"""Processes that claim a run directory: how to recognize one from the same machine, and whether it may be alive."""

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process; one that gets the same pid later has another `started`."""

    machine: str
    """Boot and pid namespace; empty where the system does not name them."""
    pid: int
    started: str


def this_process() -> Process:
    """Return this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers on one machine have pids of their own.
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return Process("", os.getpid(), "")
    return Process(machine, os.getpid(), start_time(os.getpid()))


def may_be_alive(other: Process) -> bool:
    """Return whether `other` may be alive; always True for a process on another machine."""
    if not other.machine or other.machine != this_process().machine:
        return True
    return start_time(other.pid) == other.started


def start_time(pid: int) -> str:
    """Return when the process `pid` was started, in the kernel's own count; an empty text if it has ended."""
    try:
        # The name, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
