"""Parts of batches on their way through a strip: threads compute contexts from one exchange to the next.

A context that waits for other strips is parked, and a thread takes the next one that is ready. Threads compute, pack
and unpack; the main thread posts what is packed and checks what has arrived.
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
from adam_mpi.model.engine.engine_context import EngineStripContext
from adam_mpi.model.exchange import Port
from adam_mpi.model.reference_strip_context import Segment, StripContext
from adam_mpi.sharding.batches import Batch
from adam_mpi.worker.link import Link, shaped

Arrays = dict[int, np.ndarray]
StripContexts = Sequence[StripContext | EngineStripContext]


@dataclass(eq=False)
class Flight:
    """A part of a batch in a context."""

    number: int
    batch: Batch
    slot: Any
    """The slot of the batch, for its last part."""
    context: int
    segments: list[Segment]
    place: int = 0
    """The number of the segment that is computed next."""
    posted: int = 0
    """When the exchange under way began, in nanoseconds."""


@dataclass(frozen=True)
class Event:
    """Report that a thread has packed for an exchange, has computed a segment, or has raised an error."""

    flight: Flight
    packed: Port | None = None
    error: BaseException | None = None


@dataclass
class Flow:
    """Compute parts of batches in `contexts`, on threads; `attach` a link before `begin`."""

    contexts: StripContexts
    gradients: Sequence[np.ndarray]
    """The gradient of each context."""
    injector: Injector
    threads: list[threading.Thread] = field(default_factory=list)
    ready: SimpleQueue[Flight | None] = field(default_factory=SimpleQueue)
    events: SimpleQueue[Event] = field(default_factory=SimpleQueue)
    parked: list[Flight] = field(default_factory=list)
    landed: deque[Flight] = field(default_factory=deque)
    """Flights whose segments are all computed."""
    free: set[int] = field(default_factory=set)
    computing = 0
    """The number of flights that threads compute or will compute next."""
    busy = 0.0
    """Seconds that threads have computed."""

    def start(self, threads: int) -> None:
        """Start `threads` threads."""
        for index in range(threads):
            self.threads.append(threading.Thread(target=self._work, name=f"trainer-{index}", daemon=True))
            self.threads[-1].start()

    def attach(self, link: Link) -> None:
        """Exchange through `link`, the link of a new generation."""
        self.link = link
        self.channels = link.channels
        self.last = [0] * len(self.contexts)
        """The last use of each context."""
        self.free = set(range(len(self.contexts)))
        self.ports: list[dict[Port, tuple[int, Arrays, Arrays]]] = []
        for number, context in enumerate(self.contexts):
            ports = {segment.port for segment in context.training if segment.port is not None}
            self.ports.append({port: self._port(number, context, port) for port in ports})

    def _port(self, number: int, context: StripContext | EngineStripContext, port: Port) -> tuple[int, Arrays, Arrays]:
        """Return the channel of an exchange, and the arrays that are sent and received."""
        channel = self.channels.index((number, port.exchange, port.direction))
        passage = context.exchange_buffers[port.exchange]
        out = shaped(self.link.out[channel], passage.shapes_out(port.direction))
        return channel, out, shaped(self.link.into[channel], passage.shapes_in(port.direction))

    def takes(self, number: int) -> bool:
        """Return whether the context of part `number` is free, and all its sends are complete."""
        context = number % len(self.contexts)
        if context not in self.free or not self.link.finished(context, self.last[context]):
            return False
        return all(self.link.clear(channel) for channel, _, _ in self.ports[context].values())

    def unread(self, number: int) -> list[int]:
        """Return the strips that the context of part `number` waits for although it is free."""
        context = number % len(self.contexts)
        if context not in self.free:
            return []
        channels = [channel for channel, _, _ in self.ports[context].values()]
        return self.link.unread(context, self.last[context], channels)

    def begin(self, number: int, batch: Batch, slot: Any, weights: np.ndarray, training: bool) -> None:
        """Begin part `number`, the images of `batch`, on `weights`; `takes(number)` must hold."""
        index = number % len(self.contexts)
        self.free.remove(index)
        gradient = self.gradients[index] if training else None
        block = (batch.pixels, batch.labels, batch.ids, batch.epoch, batch.edges)
        segments = self.contexts[index].begin(weights, gradient, *block)
        self._ready(Flight(number, batch, slot, index, segments))

    def release_flight(self, flight: Flight) -> None:
        """Free the context of `flight`, a part of a batch whose result and gradient are no longer needed."""
        self.free.add(flight.context)
        self.last[flight.context] = flight.number + 1
        self.link.finish(flight.context, flight.number + 1)

    def step(self) -> bool:
        """Post what threads have packed, park what waits for strips, resume what has arrived; return whether any."""
        worked = False
        self.link.step()
        while (event := self._event()) is not None:
            worked = True
            self._handle(event)
        for flight in [flight for flight in self.parked if self._arrived(flight)]:
            self.parked.remove(flight)
            # A row for each context, because the exchanges of one context do not overlap.
            trace.record("halo", flight.posted, f"context {flight.context}")
            self._ready(flight)
            worked = True
        return worked

    def rest(self, seconds: float) -> bool:
        """Wait at most `seconds` for an event of a thread; return False at once if none computes."""
        if not self.computing:
            return False
        with suppress(Empty):
            self._handle(self.events.get(timeout=seconds))
        return True

    @property
    def idle(self) -> bool:
        """Return whether a thread has nothing to do because contexts wait for other strips."""
        return bool(self.parked) and self.computing < len(self.threads)

    def awaited(self) -> dict[int, tuple[Port, int]]:
        """Return, by strip, the exchange and the number of the first part of a batch that waits for it."""
        owed: dict[int, tuple[Port, int]] = {}
        for flight in sorted(self.parked, key=lambda flight: flight.number):
            port = _exchange(flight)
            for strip in self.link.missing(self.ports[flight.context][port][0], flight.number + 1):
                owed.setdefault(strip, (port, flight.number))
        return owed

    def drop_flights(self, seconds: float) -> None:
        """Wait until no thread computes, and drop the parts under way; raises TimeoutError after `seconds`."""
        while self.computing:
            try:
                event = self.events.get(timeout=seconds)
            except Empty:
                raise TimeoutError(
                    f"{self.computing} parts of batches are still computed after {seconds:g} s; the job ends"
                ) from None
            if event.error is not None:
                raise event.error
            self.computing -= event.packed is None
        self.parked.clear()
        self.landed.clear()

    def end_threads(self) -> None:
        """End the threads."""
        for _ in self.threads:
            self.ready.put(None)

    def _event(self) -> Event | None:
        try:
            return self.events.get_nowait()
        except Empty:
            return None

    def _handle(self, event: Event) -> None:
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
        """Post what `flight` has packed for `port`; a batch may fill only some of its context's blocks."""
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
        """Compute flights until there is a None among them; this is the body of a thread."""
        while (flight := self.ready.get()) is not None:
            start = time.perf_counter()
            try:
                with trace.span("segment"):
                    self._run_segment(flight)
                self.injector.slow(time.perf_counter() - start)
                if flight.place + 1 == len(flight.segments):
                    self.injector.at("compute")
                self.events.put(Event(flight))
            except BaseException as error:  # the main thread raises it and ends the job
                self.events.put(Event(flight, error=error))
            self.busy += time.perf_counter() - start

    def _run_segment(self, flight: Flight) -> None:
        """Unpack what `flight` has received, compute its next segment, and pack what it sends."""
        context = self.contexts[flight.context]
        ports = self.ports[flight.context]
        passages = context.exchange_buffers
        blocks = context.blocks
        if flight.place:
            before = _exchange(flight)
            passages[before.exchange].unpack(before.direction, ports[before][2], blocks)
        segment = flight.segments[flight.place]
        for work in segment.work:
            work()
        if segment.port is not None:
            passages[segment.port.exchange].pack(segment.port.direction, ports[segment.port][1], blocks)
            self.events.put(Event(flight, packed=segment.port))
        for work in segment.meanwhile:
            work()


def _exchange(flight: Flight) -> Port:
    """Return the exchange before the next segment of `flight`."""
    port = flight.segments[flight.place - 1].port
    assert port is not None, "only an exchange ends a segment that another follows"
    return port
