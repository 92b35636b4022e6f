"""The optimizer of a server: the state beside each shard, and the step on what has arrived for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from adam_mpi.base.buffer_pool import NOTHING, BufferPool
from adam_mpi.base.native import address
from adam_mpi.config import Config
from adam_mpi.server import apply_kernels, optimizer_rules
from adam_mpi.server.optimizer_rules import Counted
from adam_mpi.sharding import message_format
from adam_mpi.sharding.codecs import BY_NUMBER, NUMBERS, bfloat16
from adam_mpi.sharding.factors import FactorPlan
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.spans import Spans
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights

# Parameters that factors are multiplied for at a time: enough rows for BLAS to be quick. A product that is not added to
# the weights at once has to be in the cache still when it is applied.
BAND, CACHED_BAND = 1 << 21, 1 << 19
Work = tuple[Sequence[Shard], Sequence[ReceivedMessage], Sequence[int]]
"""Shards that are stepped on together, the messages, and how many steps ago each was computed."""
AS_IT_IS = NUMBERS["none"]
FIRST, UNSCALED = np.zeros(1, np.int64), np.ones(1, np.float32)


class Stepper:
    def __init__(
        self,
        config: Config,
        shards: Sequence[Shard],
        published: PublishedWeights,
        memory: np.ndarray,
        factors: Mapping[str, FactorPlan],
        holdings: dict[int, ShardCopy] | None = None,
        arena: np.ndarray = NOTHING,
    ) -> None:
        """`shards` are those that are served here, `holdings` all that there is a copy of; else only those.

        `arena`: where other servers can read what was folded.
        """
        self.factors = factors
        self.holdings = published.take_over(shards, {}) if holdings is None else holdings
        self.config, self.shards, self.published = config, shards, published
        self.words, self.floats = memory.view(np.uint32), memory.view(np.float32)
        self.kind = _kind(config)
        self.rule = apply_kernels.RULES.index(self.kind)
        self.unit = 1.0 if self.kind == "additive" else 1 / config.train.batch
        self.batch, self.synchronous = config.train.batch, config.consistency.staleness == 0
        self.pool, self.folds = BufferPool(), BufferPool(arena)
        self.band = BAND if self.kind == "descent" else CACHED_BAND
        self.place = {shard.index: place for place, shard in enumerate(shards)}
        served = [(self.holdings[shard.index], shard.size) for shard in shards]
        self.places = np.array([(address(h.weights), address(h.state), size) for h, size in served], np.int64)
        self.followed = len(published.regions) > 1
        """Whether something else changes with the weights."""
        self.remembers = False
        """Whether each step can be taken back."""

    def start(self, shard: Shard, state: Mapping[str, np.ndarray | Spans]) -> None:
        """Take over weights, and what else there is of `state` and `average`, from flat vectors."""
        part, holding = slice(shard.start, shard.stop), self.holdings[shard.index]
        holding.weights[:], holding.whole = state["weights"][part], True
        if "state" in state:
            holding.state[:] = state["state"][part]
        if holding.ema.size:
            holding.ema[:] = state.get("ema", state["weights"])[part]
        self.derive(shard.index)

    def state(self) -> dict[str, dict[int, np.ndarray]]:
        """What a snapshot keeps, by name and shard."""
        kept = {"weights": self.published.weights}
        if self.kind not in ("additive", "descent"):
            kept["state"] = {shard.index: self.holdings[shard.index].state for shard in self.shards}
        if "ema" in self.published.regions:
            kept["ema"] = self.published.regions["ema"]
        return kept

    def bands(self, ready: Mapping[int, Sequence[ReceivedMessage]]) -> list[list[Shard]]:
        """Shards to be stepped on together: neighbors that multiply the same factors, others alone.

        Neighbors lie one after the other here: when a message comes again, shards between two may have it already.
        """
        bands: list[list[Shard]] = []
        for place in sorted(self.place[index] for index in ready):
            shard = self.shards[place]
            mails = ready[shard.index]
            beside = bool(bands) and self.place[bands[-1][-1].index] == place - 1
            alike = beside and mails == ready[bands[-1][0].index]
            multiplied = alike and all(mail.kind == message_format.FACTOR for mail in mails)
            if multiplied and _size(bands[-1]) + shard.size <= self.band:
                bands[-1].append(shard)
            else:
                bands.append([shard])
        return bands

    def unpack(self, mail: ReceivedMessage, plan: FactorPlan) -> None:
        """Once per message, before its shards are stepped on."""
        numbers = mail.values * (plan.matrix.inputs + plan.rows) + plan.biases
        out = self.pool.take(numbers) if plan.half else self.floats[:0]
        mail.buffer = out if plan.half else None
        mail.factors = plan.unpack(self.words[mail.start : mail.start + mail.words], mail.values, out)

    def release(self, mail: ReceivedMessage) -> None:
        if mail.buffer is not None:
            self.pool.give(mail.buffer)

    def step(self, works: Sequence[Work], rate: float) -> None:
        """One step of each band on its messages; called by the thread that owns these shards.

        All that can be folded where it lies in one call: between kernels, which clear the caches, Python is slow.
        """
        places: list[int] = []
        ends: list[int] = []
        starts: list[int] = []
        scales: list[float] = []
        numbers: list[np.ndarray] = []
        for band, mails, delays in works:
            if self.remembers:
                for shard in band:
                    self.holdings[shard.index].remember()
            if _plain_whole(mails, _size(band)):
                places.append(self.place[band[0].index])
                starts += [mail.start for mail in mails]
                scales += self._scales(delays)
                ends.append(len(starts))
                numbers.append(self._numbers(rate, self.counted(mails)))
            else:
                self._step_mixed(band, mails, self._scales(delays), rate)
        if places:
            messages = np.array(ends), *_messages(starts, scales)
            apply_kernels.steps(self.rule, self.places[places], self.floats, *messages, np.array(numbers))
        if self.followed:
            for band, mails, _ in works:
                for shard in band:
                    self._follow(shard.index, self.counted(mails))

    def _step_mixed(
        self, band: Sequence[Shard], mails: Sequence[ReceivedMessage], scales: Sequence[float], rate: float
    ) -> None:
        """Messages of any kind: those for the same run of parameters together."""
        runs: dict[tuple[int, int], list[tuple[ReceivedMessage, float]]] = defaultdict(list)
        for mail, scale in zip(mails, scales, strict=True):
            if mail.finite and mail.kind == message_format.SPARSE:
                self._sparse(band[0].index, mail, rate, scale)
            elif mail.finite and mail.kind == message_format.FACTOR:
                runs[0, _size(band)].append((mail, scale))
            elif mail.finite:
                runs[mail.first, mail.values].append((mail, scale))
        for (first, values), scaled in runs.items():
            if self.kind == "descent" and all(mail.kind == message_format.FACTOR for mail, _ in scaled):
                self._descend(band, scaled, rate)
            else:
                self._dense(band, slice(first, first + values), scaled, rate)

    def fold(self, band: Sequence[Shard], mails: Sequence[ReceivedMessage], delays: Sequence[int]) -> np.ndarray | None:
        """What these messages come to for a band, in a buffer of `folds`; None if no message has numbers to add."""
        scaled = [(mail, scale) for mail, scale in zip(mails, self._scales(delays), strict=True) if mail.finite]
        if not scaled:
            return None
        buffer, size = self.folds.take(_size(band)), _size(band)
        finite, scales = zip(*scaled, strict=True)
        if _plain_whole(finite, size):
            apply_kernels.fold(buffer[:size], self.floats, *_messages([mail.start for mail in finite], scales))
        else:
            self._sum(band, scaled, buffer[:size])
        return buffer

    def take(self, index: int, values: np.ndarray, rate: float, counted: Counted) -> None:
        """One step of a shard on what was folded for it: bit by bit the same on every server that has a copy."""
        holding = self.holdings[index]
        if self.remembers:
            holding.remember()
        if values.size:
            arguments = values, FIRST, UNSCALED, self._numbers(rate, counted)
            apply_kernels.step(self.rule, holding.weights, holding.state, *arguments)
        self._follow(index, counted)

    def counted(self, mails: Sequence[ReceivedMessage]) -> Counted:
        """The images that a step on these messages counts: none of those it refuses, and a whole batch per clock."""
        if self.synchronous:
            return Counted(self.batch, self.batch, self.batch)
        finite = [mail for mail in mails if mail.finite]
        begun = sum(mail.images for mail in finite if mail.part == 0)
        ended = sum(mail.images for mail in finite if mail.part == mail.parts - 1)
        pushes = {(mail.ring, mail.sequence): mail.images for mail in finite}
        return Counted(begun, sum(pushes.values()), ended)

    def foldable(self, mails: Sequence[ReceivedMessage], size: int) -> int:
        """How many of these messages for a shard may be one step, from the first on.

        AdaGrad squares what one push brings: messages for different parameters are not put together.
        """
        if self.kind != "adagrad":
            return len(mails)
        whole = [
            mail.kind == message_format.FACTOR or (mail.kind, mail.values) == (message_format.DELTA, size)
            for mail in mails
        ]
        return max(1, [*whole, False].index(False))

    def _numbers(self, rate: float, counted: Counted) -> np.ndarray:
        """The factors of a step of our rule."""
        optimizer, (begun, present, _) = self.config.optimizer, counted
        settings = optimizer.momentum, optimizer.decay
        return optimizer_rules.numbers(self.kind, settings, rate, begun / self.batch, present / self.batch)

    def _scales(self, delays: Sequence[int]) -> list[float]:
        if self.config.optimizer.staleness_scale == "inverse":
            return [self.unit / (1 + max(0, delay)) for delay in delays]
        return [self.unit] * len(delays)

    def _follow(self, index: int, counted: Counted) -> None:
        """What changes with the weights."""
        holding = self.holdings[index]
        if holding.ema.size and counted.ended:
            share = optimizer_rules.ema_weight(self.config.optimizer, counted.ended / self.batch)
            apply_kernels.update_ema(holding.ema, holding.weights, share)
        self.derive(index)

    def _dense(
        self, band: Sequence[Shard], part: slice, scaled: list[tuple[ReceivedMessage, float]], rate: float
    ) -> None:
        """Plain messages are folded where they lie; others are worked out in a buffer first, several summed up."""
        numbers = self._numbers(rate, self.counted([mail for mail, _ in scaled]))
        if all(_plain(mail) for mail, _ in scaled):
            starts, scales = [mail.start for mail, _ in scaled], [scale for _, scale in scaled]
            self._kernel(band[0].index, part, self.floats, starts, scales, numbers)
            return
        size = part.stop - part.start
        total, scale = self.pool.take(size), 1.0
        if len(scaled) == 1:
            self._work_out(band, scaled[0][0], total[:size])
            scale = scaled[0][1]
        else:
            self._sum(band, scaled, total[:size], part.start)
        for shard, start in zip(band, accumulate((shard.size for shard in band), initial=0), strict=False):
            own = part if len(band) == 1 else slice(0, shard.size)
            self._kernel(shard.index, own, total, [start], [scale], numbers)
        self.pool.give(total)

    def _descend(self, band: Sequence[Shard], scaled: list[tuple[ReceivedMessage, float]], rate: float) -> None:
        """Without a state the step is a sum: factors are multiplied straight into the weights."""
        weights = self.published.run(band)
        shrink, gain = self._numbers(rate, self.counted([mail for mail, _ in scaled]))[:2]
        if shrink:
            apply_kernels.lessen(weights, shrink)
        for mail, scale in scaled:
            assert mail.factors is not None, "unpacked when it arrived"
            self.factors[band[0].layer].add_product(mail.factors, mail.values, band, -float(gain) * scale, weights)

    def _sum(
        self, band: Sequence[Shard], scaled: list[tuple[ReceivedMessage, float]], total: np.ndarray, first: int = 0
    ) -> None:
        """What messages of any kind come to, for parameters from `first` on."""
        values = self.pool.take(total.size)
        total[:] = 0
        for mail, scale in scaled:
            if mail.kind == message_format.SPARSE:
                indices, numbers = self._pairs(mail)
                total[indices - first] += numbers * np.float32(scale)
                continue
            part = total if mail.kind == message_format.FACTOR else total[mail.first - first :][: mail.values]
            self._work_out(band, mail, values[: part.size])
            apply_kernels.add(part, values[: part.size], np.float32(scale))
        self.pool.give(values)

    def _work_out(self, band: Sequence[Shard], mail: ReceivedMessage, values: np.ndarray) -> None:
        """Decode a message, or multiply its factors."""
        if mail.kind == message_format.FACTOR:
            assert mail.factors is not None, "unpacked when it arrived"
            self.factors[band[0].layer].multiply(mail.factors, mail.values, band, values)
        else:
            BY_NUMBER[mail.codec].decode(self.words[mail.start : mail.start + mail.words], values)

    def _kernel(
        self,
        shard: int,
        part: slice,
        mail: np.ndarray,
        starts: Sequence[int],
        scales: Sequence[float],
        numbers: np.ndarray,
    ) -> None:
        holding = self.holdings[shard]
        messages = _messages(starts, scales)
        apply_kernels.step(self.rule, holding.weights[part], holding.state[part], mail, *messages, numbers)

    def _sparse(self, shard: int, mail: ReceivedMessage, rate: float, scale: float) -> None:
        """(index, value) pairs: only what is named is touched."""
        indices, values = self._pairs(mail)
        weights, state = self.holdings[shard].weights, self.holdings[shard].state
        apply_kernels.SPARSE_KERNELS[self.kind](weights, state, indices, values * np.float32(scale), np.float32(rate))

    def _pairs(self, mail: ReceivedMessage) -> tuple[np.ndarray, np.ndarray]:
        """Indices, each at most once, and their values."""
        indices = self.words[mail.start : mail.start + mail.values].astype(np.int64)
        return indices, self.floats[mail.start + mail.values : mail.start + 2 * mail.values]

    def derive(self, shard: int) -> None:
        """What is published beside the weights and follows from them."""
        if shard in self.published.regions.get("short", ()):
            weights = self.published.weights[shard]
            bfloat16.shorten(weights.view(np.uint32), self.published.regions["short"][shard])


def _plain(mail: ReceivedMessage) -> bool:
    """Whether its values lie in the mailbox as they are."""
    return mail.kind == message_format.DELTA and mail.codec == AS_IT_IS


def _plain_whole(mails: Sequence[ReceivedMessage], size: int) -> bool:
    """Whether all of them can be folded where they lie."""
    for mail in mails:
        if not (mail.values == size and mail.finite and _plain(mail)):
            return False
    return True


def _messages(starts: Sequence[int], scales: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(starts, np.int64), np.array(scales, np.float32)


def _size(band: Sequence[Shard]) -> int:
    return band[0].size if len(band) == 1 else sum(shard.size for shard in band)


def _kind(config: Config) -> str:
    """The kernel of the configured rule; without momentum there is no velocity to be kept."""
    if config.optimizer.where == "worker":
        return "additive"
    return config.optimizer.kind if config.optimizer.kind == "adagrad" or config.optimizer.momentum else "descent"
