"""The optimiser of a server: the state beside each shard, and the step on what has arrived for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from adam_mpi.config import Config
from adam_mpi.server import apply, mailbox
from adam_mpi.server.codecs import BY_NUMBER, NUMBERS, bfloat16
from adam_mpi.server.factors import FactorPlan
from adam_mpi.server.mail import Mail
from adam_mpi.server.pool import Pool
from adam_mpi.server.published import Published
from adam_mpi.server.shards import Shard


class Stepper:
    def __init__(
        self, config: Config, shards: Sequence[Shard], published: Published, memory: np.ndarray,
        factors: Mapping[str, FactorPlan],
    ) -> None:  # fmt: skip
        self.factors = factors
        self.config, self.shards, self.published = config, shards, published
        self.words, self.floats = memory.view(np.uint32), memory.view(np.float32)
        self.kind = "additive" if config.optimiser.where == "worker" else config.optimiser.kind
        self.states = {shard.index: np.zeros(shard.size, np.float32) for shard in shards}
        self.unit = 1.0 if self.kind == "additive" else 1 / config.train.batch
        self.pool = Pool()

    def start(self, state: dict[str, np.ndarray]) -> None:
        """Take over weights, and what else there is of `state` and `average`, from flat vectors."""
        for shard in self.shards:
            part = slice(shard.start, shard.stop)
            self.published.weights[shard.index][:] = state["weights"][part]
            if "state" in state:
                self.states[shard.index][:] = state["state"][part]
            if "average" in self.published.regions:
                self.published.regions["average"][shard.index][:] = state.get("average", state["weights"])[part]
            self._derive(shard.index)

    def state(self) -> dict[str, dict[int, np.ndarray]]:
        """What a snapshot keeps, by name and shard."""
        kept = {"weights": self.published.weights, "state": self.states}
        if "average" in self.published.regions:
            kept["average"] = self.published.regions["average"]
        return kept

    def step(self, shard: int, mails: Sequence[Mail], delays: Sequence[int], rate: float) -> None:
        """One step on these messages; called by the thread that owns the shard."""
        runs: dict[tuple[int, int], list[tuple[Mail, float]]] = defaultdict(list)
        for mail, delay in zip(mails, delays, strict=True):
            scale = self.unit / (1 + max(0, delay) if self.config.optimiser.staleness_scale == "inverse" else 1)
            if mail.finite and mail.kind == mailbox.SPARSE:
                self._sparse(shard, mail, rate, scale)
            elif mail.finite and mail.kind == mailbox.FACTOR:
                runs[0, self.states[shard].size].append((mail, scale))
            elif mail.finite:
                runs[mail.first, mail.values].append((mail, scale))
        for (first, values), scaled in runs.items():
            self._dense(shard, slice(first, first + values), scaled, rate)
        if "average" in self.published.regions:
            share = np.float32(self.config.optimiser.average)
            apply.average(self.published.regions["average"][shard], self.published.weights[shard], share)
        self._derive(shard)

    def _dense(self, shard: int, part: slice, scaled: list[tuple[Mail, float]], rate: float) -> None:
        """Plain messages are folded where they lie; others are worked out and summed up in a buffer first."""
        plain = [(m.start, scale) for m, scale in scaled if m.kind == mailbox.DELTA and m.codec == NUMBERS["none"]]
        if len(plain) == len(scaled):
            self._kernel(shard, part, self.floats, plain, rate)
            return
        size = part.stop - part.start
        total, values = self.pool.take(size), self.pool.take(size)
        total[:size] = 0
        for mail, scale in scaled:
            self._work_out(shard, mail, values[:size])
            apply.add(total[:size], values[:size], np.float32(scale))
        self._kernel(shard, part, total, [(0, 1.0)], rate)
        self.pool.give(total)
        self.pool.give(values)

    def _work_out(self, shard: int, mail: Mail, values: np.ndarray) -> None:
        """Decode a message, or multiply its factors."""
        if mail.kind == mailbox.FACTOR:
            held = next(held for held in self.shards if held.index == shard)
            body = self.floats[mail.start : mail.start + mail.words]
            self.factors[held.layer].multiply(body, mail.values, held, values)
        else:
            BY_NUMBER[mail.codec].decode(self.words[mail.start : mail.start + mail.words], values)

    def _kernel(self, shard: int, part: slice, mail: np.ndarray, plain: list[tuple[int, float]], rate: float) -> None:
        starts, scales = np.array([start for start, _ in plain], np.int64), np.array([s for _, s in plain], np.float32)
        optimiser = self.config.optimiser
        numbers = (np.float32(number) for number in (rate, optimiser.momentum, optimiser.decay))
        weights, state = self.published.weights[shard][part], self.states[shard][part]
        apply.KERNELS[self.kind](weights, state, mail, starts, scales, *numbers)

    def _sparse(self, shard: int, mail: Mail, rate: float, scale: float) -> None:
        """(index, value) pairs: only what is named is touched."""
        indices = self.words[mail.start : mail.start + mail.values].astype(np.int64)
        values = self.floats[mail.start + mail.values : mail.start + 2 * mail.values] * np.float32(scale)
        kernel = apply.SPARSE_KERNELS[self.kind]
        kernel(self.published.weights[shard], self.states[shard], indices, values, np.float32(rate))

    def _derive(self, shard: int) -> None:
        """What is published beside the weights and follows from them."""
        if "short" in self.published.regions:
            weights = self.published.weights[shard]
            bfloat16.shorten(weights.view(np.uint32), self.published.regions["short"][shard])
