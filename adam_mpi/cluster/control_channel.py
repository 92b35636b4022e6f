"""Small control messages between ranks, sent without waiting and received when they have arrived."""

from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.messages import Message, decode, encode


class ControlChannel:
    """Send and receive control messages over one communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        # Buffers stay referenced until their request is complete.
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.arriving: dict[int, deque[tuple[MPI.Request, np.ndarray]]] = defaultdict(deque)

    def send(self, message: Message, to: int) -> None:
        """Send `message` to rank `to`, without waiting for its arrival."""
        body = np.frombuffer(encode(message), np.uint8)
        self.sending.append((self.comm.Isend(body, to), body))

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yield (sender, message) for each message that has arrived since the last call."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        status = MPI.Status()
        while (envelope := self.comm.Improbe(status=status)) is not None:
            body = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.arriving[status.source].append((envelope.Irecv(body), body))
        # Messages of one sender are yielded in the order they were sent; one that is incomplete delays no other sender.
        for source, messages in self.arriving.items():
            while messages and messages[0][0].Test():
                _, body = messages.popleft()
                yield source, decode(body.tobytes())

    @property
    def idle(self) -> bool:
        """Return whether all sent messages have left."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        return not self.sending
