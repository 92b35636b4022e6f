"""The delay of pushes, in gradients of other pushers between the weights they were computed on and their step. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from adam_mpi.config import Config
from adam_mpi.transport.mailbox import ReceivedMessage

KEPT = 512
"""Steps of a shard whose gradients are remembered; a push that is later counts those of all of them."""
STABLE = 4.0
"""Largest product of the learning rate, summed over the batches that momentum repeats it for, and a push's delay. A
step by a gradient that is n gradients late overshoots where n times the rate times the curvature exceeds about 1; with
clipped gradients, 4 was the largest product without a loss of accuracy (docs/explanation/asynchrony.md)."""


class ShardHistory:
    """Count the gradients, in batches, that the steps of one shard have had."""

    def __init__(self, version: int) -> None:
        """Begin with the shard at `version`."""
        self.first = version
        """The version of the first total."""
        self.totals: deque[float] = deque([0.0])
        """The gradients of all steps up to a version, for each version from the first on."""
        self.own: dict[int, deque[tuple[int, float]]] = defaultdict(deque)
        """Pusher -> (version after the step, batches) of its own pushes."""

    def delays(self, version: int, pushes: Sequence[tuple[int, int, float]], joint: bool = False) -> list[float]:
        """Return the delay of each of `pushes`, which make the step from `version`, and count them.

        A push is (pusher, version that it was computed on, batches). Its delay has no gradients of its own pusher,
        which knew them. Those before it in the same step delay it too, unless they are the parts of `joint` batches.
        """
        found = []
        total = self.totals[-1]
        for pusher, seen, batches in pushes:
            own = self.own[pusher]
            while own and own[0][0] <= seen:
                own.popleft()
            known = self.totals[max(0, min(seen - self.first, len(self.totals) - 1))]
            ahead = self.totals[-1] if joint else total
            found.append(max(0.0, ahead - known - sum(count for _, count in own)))
            own.append((version + 1, batches))
            total += batches
        self._append(total)
        return found

    def _append(self, total: float) -> None:
        self.totals.append(total)
        if len(self.totals) > KEPT:
            self.totals.popleft()
            self.first += 1


class PushDelays:
    """The delays of the pushes of one server during one generation, and what is done about late ones."""

    def __init__(self, config: Config) -> None:
        self.batch = config.train.batch
        self.joint = not config.asynchronous
        optimizer = config.optimizer
        word, _, limit = optimizer.stale.partition(":")
        # In a run that checks conservation every push must count as it is, and with clocks the bound is on the clocks.
        judged = config.asynchronous and not config.inject.conserve
        self.most = float(limit) if word == "drop" and judged else math.inf
        """The delay beyond which a push is left out."""
        self.scaled = word == "scale" and judged and optimizer.kind in ("momentum", "nesterov")
        """Whether late pushes are scaled down: rules that divide by the size of gradients would undo it."""
        self.repeats = 1 / (1 - optimizer.momentum)
        self.histories: dict[int, ShardHistory] = {}

    def measure(self, shard: int, version: int, messages: Sequence[ReceivedMessage]) -> list[float]:
        """Return the delay of each of `messages`, the next step of `shard` at `version`."""
        if shard not in self.histories:
            self.histories[shard] = ShardHistory(version)
        pushes = [(message.pusher, message.seen, message.images / self.batch) for message in messages]
        return self.histories[shard].delays(version, pushes, self.joint)

    def drop(self, messages: Sequence[ReceivedMessage], delays: Sequence[float]) -> int:
        """Leave out what is too late: it is acknowledged, and no step has it. Return how many of `messages` it is."""
        late = [message for message, delay in zip(messages, delays, strict=True) if delay > self.most]
        for message in late:
            message.finite = 0
        return len(late)

    def factor(self, delay: float, rate: float) -> float:
        """Return what a push that is `delay` gradients late is multiplied by, at the learning rate `rate`."""
        product = rate * self.repeats * delay
        return STABLE / product if self.scaled and product > STABLE else 1.0
