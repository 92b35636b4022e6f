#!/usr/bin/env python3
"""A wire that holds back what test hosts send, for kernels without netem: `wire.py LAB DELAY HOSTS`.

scripts/hosts starts it in the namespace of the bridge. For each host it makes two TAP devices there: `wireN`, which is
then moved to the host as its interface, and `hN`, its port on the bridge. What a host sends goes on after the delay, in
order and with many packets under way; what comes for it goes on at once. It ends when its hosts do.
"""

import fcntl
import os
import re
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LARGEST_PACKET, BURST, MOST_HELD = 1 << 17, 64, 4096
LOOK_SECONDS = 1.0


def main() -> None:
    lab, delay, hosts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    ends = [(tap(f"wire{number}"), tap(f"h{number}")) for number in range(hosts)]
    # Whoever has started it goes on when the devices are there.
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    carry(dict(ends), {port: host for host, port in ends}, seconds(delay), (lab / "name").exists)


def seconds(delay: str) -> float:
    """Of a time as in 1ms."""
    found = re.fullmatch(r"([\d.]+)(us|ms|s)", delay)
    assert found, delay
    return float(found[1]) * UNITS[found[2]]


def tap(name: str) -> int:
    """A new network device, whose packets are read and written here; it is gone when this process is."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return device


def carry(outward: dict[int, int], inward: dict[int, int], delay: float, wanted: Callable[[], bool]) -> None:
    """Pass packets on, each from a device to its other end, as long as that is wanted."""
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else LOOK_SECONDS
        # A wire that is full takes no more: the kernel's own queues fill up.
        taking = [*inward, *(outward if len(held) < MOST_HELD else ())]
        ready, _, _ = select.select(taking, [], [], wait)
        if not (ready or held or wanted()):
            return
        for device in ready:
            for packet in packets(device):
                if device in inward:
                    pass_on(inward[device], packet)
                else:
                    held.append((time.monotonic() + delay, outward[device], packet))
        while held and held[0][0] <= time.monotonic():
            pass_on(*held.popleft()[1:])


def packets(device: int) -> Iterator[bytes]:
    """Those that have come, but no more than a burst: others wait too."""
    with suppress(BlockingIOError):
        for _ in range(BURST):
            yield os.read(device, LARGEST_PACKET)


def pass_on(device: int, packet: bytes) -> None:
    # An interface that is down loses what is sent to it.
    with suppress(OSError):
        os.write(device, packet)


if __name__ == "__main__":
    main()
