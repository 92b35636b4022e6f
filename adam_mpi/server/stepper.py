"""The optimizer of a server: the state beside each shard, and the step on the messages that have arrived for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from adam_mpi.base.native import address
from adam_mpi.base.pools import EMPTY
from adam_mpi.config import Config
from adam_mpi.server import apply_kernels, optimizer_rules
from adam_mpi.server.message_values import (
    MessageValues,
    ScaledMessage,
    are_plain,
    band_size,
    is_plain,
    kernel_messages,
    unpacked,
)
from adam_mpi.server.optimizer_rules import ImageCounts
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import bfloat16
from adam_mpi.sharding.push_protocol import FactorPlan
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard, Spans
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights

# Parameters that factors are multiplied for at a time: enough rows for BLAS to be quick. A product that is not added to
# the weights at once must still be in the cache when it is applied.
BAND = 1 << 21
CACHED_BAND = 1 << 19
Work = tuple[Sequence[Shard], Sequence[ReceivedMessage], Sequence[int]]
"""A band (shards that are stepped together), its messages, and how many steps ago each of them was computed."""
FIRST = np.zeros(1, np.int64)
UNSCALED = np.ones(1, np.float32)


class Stepper:
    """Takes the optimizer steps of the shards of one server during one generation."""

    def __init__(
        self,
        config: Config,
        shards: Sequence[Shard],
        published: PublishedWeights,
        memory: np.ndarray,
        factors: Mapping[str, FactorPlan],
        shard_copies: dict[int, ShardCopy] | None = None,
        arena: np.ndarray = EMPTY,
    ) -> None:
        """Step the served `shards`; `shard_copies` are all copies here, by shard (by default of `shards` only).

        `memory` is the mailbox; `arena` is memory where other servers can read folded gradients.
        """
        self.config = config
        self.shards = shards
        self.published = published
        self.shard_copies = published.take_over(shards, {}) if shard_copies is None else shard_copies
        self.values = MessageValues(memory, factors, arena)
        self.kind = _kind(config)
        self.rule = apply_kernels.RULES.index(self.kind)
        self.unit = 1.0 if self.kind == "additive" else 1 / config.train.batch
        self.batch = config.train.batch
        self.synchronous = config.consistency.staleness == 0
        self.largest_band = BAND if self.kind == "descent" else CACHED_BAND
        self.place = {shard.index: place for place, shard in enumerate(shards)}
        served = [(self.shard_copies[shard.index], shard.size) for shard in shards]
        self.places = np.array([(address(own.weights), address(own.state), size) for own, size in served], np.int64)
        self.derives = len(published.regions) > 1
        """Whether something else that is published changes with the weights."""
        self.remembers = False
        """Whether each step can be taken back."""

    def start(self, shard: Shard, state: Mapping[str, np.ndarray | Spans]) -> None:
        """Take over the weights of `shard`, and its optimizer state and running average if given, from flat vectors."""
        part = slice(shard.start, shard.stop)
        own = self.shard_copies[shard.index]
        own.weights[:] = state["weights"][part]
        own.whole = True
        if "state" in state:
            own.state[:] = state["state"][part]
        if own.ema.size:
            own.ema[:] = state.get("ema", state["weights"])[part]
        self.derive(shard.index)

    def state(self) -> dict[str, dict[int, np.ndarray]]:
        """Return the arrays that a snapshot keeps, by name and shard."""
        kept = {"weights": self.published.weights}
        if self.kind not in ("additive", "descent"):
            kept["state"] = {shard.index: self.shard_copies[shard.index].state for shard in self.shards}
        if "ema" in self.published.regions:
            kept["ema"] = self.published.regions["ema"]
        return kept

    def bands(self, ready: Mapping[int, Sequence[ReceivedMessage]]) -> list[list[Shard]]:
        """Return the shards of `ready` in bands: neighbors that multiply the same factors together, others alone.

        Neighbors lie one after the other in the published memory. When a message is sent again, shards between two
        others may have it already.
        """
        bands: list[list[Shard]] = []
        for place in sorted(self.place[index] for index in ready):
            shard = self.shards[place]
            messages = ready[shard.index]
            beside = bool(bands) and self.place[bands[-1][-1].index] == place - 1
            alike = beside and messages == ready[bands[-1][0].index]
            multiplied = alike and all(message.kind == message_formats.FACTOR for message in messages)
            if multiplied and band_size(bands[-1]) + shard.size <= self.largest_band:
                bands[-1].append(shard)
            else:
                bands.append([shard])
        return bands

    def step(self, works: Sequence[Work], rate: float) -> None:
        """Take one step of each band on its messages; the thread that owns these shards calls this.

        All messages that can be folded where they lie go into one call of a kernel, because Python is slow between
        kernels, which clear the caches.
        """
        places: list[int] = []
        ends: list[int] = []
        starts: list[int] = []
        scales: list[float] = []
        coefficients: list[np.ndarray] = []
        for band, messages, delays in works:
            if self.remembers:
                for shard in band:
                    self.shard_copies[shard.index].remember()
            if are_plain(messages, band_size(band)):
                places.append(self.place[band[0].index])
                starts += [message.start for message in messages]
                scales += self.scales(delays)
                ends.append(len(starts))
                coefficients.append(self._coefficients(rate, self.count_images(messages)))
            else:
                self._step_mixed(band, messages, self.scales(delays), rate)
        if places:
            arguments = np.array(ends), *kernel_messages(starts, scales), np.array(coefficients)
            apply_kernels.steps(self.rule, self.places[places], self.values.floats, *arguments)
        if self.derives:
            for band, messages, _ in works:
                for shard in band:
                    self._update_derived(shard.index, self.count_images(messages))

    def step_folded(self, index: int, values: np.ndarray, rate: float, images: ImageCounts) -> None:
        """Take one step of shard `index` on a folded gradient: the same bits on every server that has a copy."""
        own = self.shard_copies[index]
        if self.remembers:
            own.remember()
        if values.size:
            arguments = values, FIRST, UNSCALED, self._coefficients(rate, images)
            apply_kernels.step(self.rule, own.weights, own.state, *arguments)
        self._update_derived(index, images)

    def count_images(self, messages: Sequence[ReceivedMessage]) -> ImageCounts:
        """Return the images that a step on `messages` counts: no refused ones, and a whole batch per clock."""
        if self.synchronous:
            return ImageCounts(self.batch, self.batch, self.batch)
        finite = [message for message in messages if message.finite]
        begun = sum(message.images for message in finite if message.part == 0)
        ended = sum(message.images for message in finite if message.part == message.parts - 1)
        pushes = {(message.ring, message.sequence): message.images for message in finite}
        return ImageCounts(begun, sum(pushes.values()), ended)

    def foldable(self, messages: Sequence[ReceivedMessage], size: int) -> int:
        """Return how many of `messages` for a shard of `size` parameters may be one step, from the first on.

        AdaGrad squares the gradient of a push, so messages for different parameters are not summed.
        """
        if self.kind != "adagrad":
            return len(messages)
        whole = [
            message.kind == message_formats.FACTOR or (message.kind, message.values) == (message_formats.DELTA, size)
            for message in messages
        ]
        return max(1, [*whole, False].index(False))

    def scales(self, delays: Sequence[int]) -> list[float]:
        """Return what the values of messages are multiplied by, from the delay of each."""
        if self.config.optimizer.staleness_scale == "inverse":
            return [self.unit / (1 + max(0, delay)) for delay in delays]
        return [self.unit] * len(delays)

    def derive(self, shard: int) -> None:
        """Update what is published beside the weights of `shard` and follows from them."""
        if shard in self.published.regions.get("short", ()):
            weights = self.published.weights[shard]
            bfloat16.shorten(weights.view(np.uint32), self.published.regions["short"][shard])

    def _coefficients(self, rate: float, images: ImageCounts) -> np.ndarray:
        """Return the coefficients of a step of the configured rule."""
        optimizer = self.config.optimizer
        begun = images.begun / self.batch
        present = images.present / self.batch
        return optimizer_rules.coefficients(self.kind, (optimizer.momentum, optimizer.decay), rate, begun, present)

    def _update_derived(self, index: int, images: ImageCounts) -> None:
        """Update what changes with the weights of shard `index`: the running average and the short weights."""
        own = self.shard_copies[index]
        if own.ema.size and images.ended:
            share = optimizer_rules.ema_weight(self.config.optimizer, images.ended / self.batch)
            apply_kernels.update_ema(own.ema, own.weights, share)
        self.derive(index)

    def _step_mixed(
        self, band: Sequence[Shard], messages: Sequence[ReceivedMessage], scales: Sequence[float], rate: float
    ) -> None:
        """Step `band` on messages of any kind, those for the same run of parameters together."""
        runs: dict[tuple[int, int], list[ScaledMessage]] = defaultdict(list)
        for message, scale in zip(messages, scales, strict=True):
            if message.finite and message.kind == message_formats.SPARSE:
                self._step_sparse(band[0].index, message, rate, scale)
            elif message.finite and message.kind == message_formats.FACTOR:
                runs[0, band_size(band)].append((message, scale))
            elif message.finite:
                runs[message.first, message.values].append((message, scale))
        for (first, values), scaled in runs.items():
            if self.kind == "descent" and all(message.kind == message_formats.FACTOR for message, _ in scaled):
                self._multiply_into_weights(band, scaled, rate)
            else:
                self._step_dense(band, slice(first, first + values), scaled, rate)

    def _step_dense(self, band: Sequence[Shard], part: slice, scaled: list[ScaledMessage], rate: float) -> None:
        """Step the parameters `part` of `band`; plain messages are folded where they lie, others in a buffer."""
        coefficients = self._coefficients(rate, self.count_images([message for message, _ in scaled]))
        if all(is_plain(message) for message, _ in scaled):
            starts = [message.start for message, _ in scaled]
            messages = kernel_messages(starts, [scale for _, scale in scaled])
            self._run_kernel(band[0].index, part, self.values.floats, messages, coefficients)
            return
        size = part.stop - part.start
        total = self.values.pool.take(size)
        scale = 1.0
        if len(scaled) == 1:
            message, scale = scaled[0]
            self.values.decode(band, message, total[:size])
        else:
            self.values.sum_into(band, scaled, total[:size], part.start)
        for shard, start in zip(band, accumulate((shard.size for shard in band), initial=0), strict=False):
            own = part if len(band) == 1 else slice(0, shard.size)
            self._run_kernel(shard.index, own, total, kernel_messages([start], [scale]), coefficients)
        self.values.pool.give(total)

    def _multiply_into_weights(self, band: Sequence[Shard], scaled: list[ScaledMessage], rate: float) -> None:
        """Multiply factors straight into the weights: without a state, the step is a sum."""
        weights = self.published.run(band)
        shrink, gain = self._coefficients(rate, self.count_images([message for message, _ in scaled]))[:2]
        if shrink:
            apply_kernels.shrink_weights(weights, shrink)
        plan = self.values.plan(band)
        for message, scale in scaled:
            plan.add_product(unpacked(message), message.values, band, -float(gain) * scale, weights)

    def _run_kernel(
        self,
        shard: int,
        part: slice,
        memory: np.ndarray,
        messages: tuple[np.ndarray, np.ndarray],
        coefficients: np.ndarray,
    ) -> None:
        """Run the kernel of the rule on the parameters `part` of `shard`."""
        own = self.shard_copies[shard]
        apply_kernels.step(self.rule, own.weights[part], own.state[part], memory, *messages, coefficients)

    def _step_sparse(self, shard: int, message: ReceivedMessage, rate: float, scale: float) -> None:
        """Step the parameters that the (index, value) pairs of `message` name, and no others."""
        indices, values = self.values.pairs(message)
        own = self.shard_copies[shard]
        kernel = apply_kernels.SPARSE_KERNELS[self.kind]
        kernel(own.weights, own.state, indices, values * np.float32(scale), np.float32(rate))


def _kind(config: Config) -> str:
    """Return the rule whose kernel is used; without momentum there is no velocity to be kept."""
    if config.optimizer.where == "worker":
        return "additive"
    return config.optimizer.kind if config.optimizer.kind == "adagrad" or config.optimizer.momentum else "descent"
