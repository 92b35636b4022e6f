"""Batches on their way through a strip: contexts that trainer threads carry from one exchange to the next.

A context that waits for other strips is parked, and a thread takes the next one that is ready. Threads compute, pack
and unpack; the main thread moves what is packed and says what has arrived.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.fault_injection import Injector
from adam_mpi.model.engine.strip_context import EngineStripContext
from adam_mpi.model.exchange_buffers import Port
from adam_mpi.model.strip_context import Segment, StripContext
from adam_mpi.transport.batch_message import Batch
from adam_mpi.worker.link import Link, shaped

Arrays = dict[int, np.ndarray]
StripContexts = Sequence[StripContext | EngineStripContext]


@dataclass(eq=False)
class Flight:
    """A part of a batch in a context; `place` is the segment that comes next."""

    number: int
    batch: Batch
    slot: Any
    """Where the batch came from, for its last part."""
    context: int
    segments: list[Segment]
    place: int = 0
    posted: int = 0
    """When the exchange under way began, in nanoseconds."""


@dataclass(frozen=True)
class Event:
    """A thread has packed for an exchange, or is done with a segment, or in trouble."""

    flight: Flight
    packed: Port | None = None
    error: BaseException | None = None


@dataclass
class Flow:
    contexts: StripContexts
    gradients: Sequence[np.ndarray]
    """Of each context."""
    injector: Injector
    threads: list[threading.Thread] = field(default_factory=list)
    ready: SimpleQueue[Flight | None] = field(default_factory=SimpleQueue)
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)
    parked: list[Flight] = field(default_factory=list)
    landed: deque[Flight] = field(default_factory=deque)
    """BatchResult with all segments."""
    free: set[int] = field(default_factory=set)
    computing = 0
    """Flights that are with the threads."""
    busy = 0.0

    def start(self, threads: int) -> None:
        for index in range(threads):
            self.threads.append(threading.Thread(target=self._work, name=f"trainer-{index}", daemon=True))
            self.threads[-1].start()

    def attach(self, link: Link) -> None:
        """Exchange through the link of this generation."""
        self.link, self.channels, self.last = link, link.channels, [0] * len(self.contexts)
        self.free = set(range(len(self.contexts)))
        self.ports: list[dict[Port, tuple[int, Arrays, Arrays]]] = []
        for number, context in enumerate(self.contexts):
            ports = {segment.port for segment in context.training if segment.port is not None}
            self.ports.append({port: self._port(number, context, port) for port in ports})

    def _port(self, number: int, context: StripContext | EngineStripContext, port: Port) -> tuple[int, Arrays, Arrays]:
        """The channel of an exchange, what goes out and what comes in."""
        channel, passage = self.channels.index((number, port.passage, port.direction)), context.passages[port.passage]
        out = shaped(self.link.out[channel], passage.shapes_out(port.direction))
        return channel, out, shaped(self.link.into[channel], passage.shapes_in(port.direction))

    def takes(self, number: int) -> bool:
        """Whether this batch's context is free, and all it has sent is gone."""
        context = number % len(self.contexts)
        if context not in self.free or not self.link.finished(context, self.last[context]):
            return False
        return all(self.link.clear(channel) for channel, _, _ in self.ports[context].values())

    def unread(self, number: int) -> list[int]:
        """The strips that this batch's context waits for though it is free."""
        context = number % len(self.contexts)
        if context not in self.free:
            return []
        channels = [channel for channel, _, _ in self.ports[context].values()]
        return self.link.unread(context, self.last[context], channels)

    def begin(self, number: int, batch: Batch, slot: Any, weights: np.ndarray, training: bool) -> None:
        index = number % len(self.contexts)
        self.free.remove(index)
        gradient = self.gradients[index] if training else None
        block = batch.pixels, batch.labels, batch.ids, batch.epoch, batch.edges
        flight = Flight(number, batch, slot, index, self.contexts[index].begin(weights, gradient, *block))
        self._ready(flight)

    def release(self, flight: Flight) -> None:
        """Its result and gradient are no longer needed."""
        self.free.add(flight.context)
        self.last[flight.context] = flight.number + 1
        self.link.finish(flight.context, flight.number + 1)

    def step(self) -> bool:
        """Move what threads have packed, park what they are done with, and give them what has arrived."""
        worked = False
        self.link.step()
        while (event := self._event()) is not None:
            worked = True
            self._hear(event)
        for flight in [flight for flight in self.parked if self._arrived(flight)]:
            self.parked.remove(flight)
            # A row for each context: there one exchange follows the other.
            trace.record("halo", flight.posted, f"context {flight.context}")
            self._ready(flight)
            worked = True
        return worked

    def rest(self, seconds: float) -> bool:
        """Until a thread has something to say, but not longer; False at once if none is computing."""
        if not self.computing:
            return False
        with suppress(Empty):
            self._hear(self.events.get(timeout=seconds))
        return True

    @property
    def idle(self) -> bool:
        """Whether a thread has nothing to do though contexts wait for other strips."""
        return bool(self.parked) and self.computing < len(self.threads)

    def awaited(self) -> dict[int, tuple[Port, int]]:
        """Strip -> the exchange and number of the first part of a batch that waits for it."""
        owed: dict[int, tuple[Port, int]] = {}
        for flight in sorted(self.parked, key=lambda flight: flight.number):
            port = _exchange(flight)
            for strip in self.link.missing(self.ports[flight.context][port][0], flight.number + 1):
                owed.setdefault(strip, (port, flight.number))
        return owed

    def halt(self, seconds: float) -> None:
        """Until no thread computes any more; what is under way ends here, at whatever exchange it has come to."""
        while self.computing:
            try:
                event = self.events.get(timeout=seconds)
            except Empty:
                raise TimeoutError(f"parts of batches still computed after {seconds:g} s: {self.computing}") from None
            if event.error is not None:
                raise event.error
            self.computing -= event.packed is None
        self.parked.clear()
        self.landed.clear()

    def stop(self) -> None:
        for _ in self.threads:
            self.ready.put(None)

    def _event(self) -> Event | None:
        try:
            return self.events.get_nowait()
        except Empty:
            return None

    def _hear(self, event: Event) -> None:
        flight = event.flight
        if event.error is not None:
            raise event.error
        if event.packed is not None:
            self._post(flight, event.packed)
            return
        self.computing -= 1
        flight.place += 1
        if flight.place < len(flight.segments):
            self.parked.append(flight)
        else:
            self.landed.append(flight)

    def _post(self, flight: Flight, port: Port) -> None:
        """A batch may fill a part of its context's blocks."""
        context = self.contexts[flight.context]
        channel, out, _ = self.ports[flight.context][port]
        used = {target: values[: context.blocks].size for target, values in out.items()}
        flight.posted = trace.now()
        self.link.post(channel, flight.number + 1, used)

    def _arrived(self, flight: Flight) -> bool:
        channel = self.ports[flight.context][_exchange(flight)][0]
        return self.link.arrived(channel, flight.number + 1)

    def _ready(self, flight: Flight) -> None:
        self.computing += 1
        self.ready.put(flight)

    def _work(self) -> None:
        """A trainer thread."""
        while (flight := self.ready.get()) is not None:
            start = time.perf_counter()
            try:
                with trace.span("segment"):
                    self._run(flight)
                self.injector.slow(time.perf_counter() - start)
                if flight.place + 1 == len(flight.segments):
                    self.injector.at("compute")
                self.events.put(Event(flight))
            except BaseException as error:  # told to the main thread, which ends the job
                self.events.put(Event(flight, error=error))
            self.busy += time.perf_counter() - start

    def _run(self, flight: Flight) -> None:
        context, ports = self.contexts[flight.context], self.ports[flight.context]
        passages, blocks = context.passages, context.blocks
        if flight.place:
            before = _exchange(flight)
            passages[before.passage].unpack(before.direction, ports[before][2], blocks)
        segment = flight.segments[flight.place]
        for work in segment.work:
            work()
        if segment.port is not None:
            passages[segment.port.passage].pack(segment.port.direction, ports[segment.port][1], blocks)
            self.events.put(Event(flight, packed=segment.port))
        for work in segment.meanwhile:
            work()


def _exchange(flight: Flight) -> Port:
    """The one before the segment that comes next."""
    port = flight.segments[flight.place - 1].port
    assert port is not None, "only an exchange ends a segment that another follows"
    return port
