"""The optimizer of a server: the state beside each shard, and the step on the messages that have arrived for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from adam_mpi.base.pools import EMPTY
from adam_mpi.config import Config
from adam_mpi.optimizer import ema, kernels, rules
from adam_mpi.optimizer.groups import GroupSpan
from adam_mpi.optimizer.settings import ImageCounts
from adam_mpi.server.kernel_call import KernelCall
from adam_mpi.server.message_values import (
    MessageValues,
    ScaledMessage,
    are_plain,
    band_size,
    is_partial,
    is_plain,
    unpacked,
)
from adam_mpi.server.shard_steps import ShardSteps
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import bfloat16
from adam_mpi.sharding.push_protocol import FactorPlan
from adam_mpi.sharding.shard_copy import BATCHES, ShardCopy
from adam_mpi.sharding.shards import Gathered, Shard
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights

# Parameters that factors are multiplied for at a time: enough rows for BLAS to be quick. A product that is not added to
# the weights at once must still be in the cache when it is applied.
BAND = 1 << 21
CACHED_BAND = 1 << 19
Work = tuple[Sequence[Shard], Sequence[ReceivedMessage], Sequence[float]]
"""A band (shards that are stepped together), its messages, and what each is multiplied by because it is late."""


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
        groups: Sequence[GroupSpan] = (),
    ) -> None:
        """Step the served `shards`; `shard_copies` are all copies here, by shard (by default of `shards` only).

        `memory` is the mailbox; `arena` is memory where other servers can read folded gradients; `groups` are those of
        all parameters.
        """
        self.config = config
        self.shards = shards
        self.published = published
        self.shard_copies = published.take_over(shards, {}) if shard_copies is None else shard_copies
        self.values = MessageValues(memory, factors, arena)
        self.rule = rules.rule_of(config.optimizer)
        self.steps = ShardSteps(config, self.shard_copies, groups)
        self.unit = 1.0 if self.rule.name == "additive" else 1 / config.train.batch
        self.batch = config.train.batch
        self.synchronous = config.consistency.staleness == 0
        self.sums = self.rule.linear or self.synchronous
        """Whether the gradients of several messages are one step."""
        self.stays = self.rule.stays and not config.optimizer.decay
        """Whether a gradient of zero changes nothing, so that a push of some parameters may be one of all."""
        self.multiplies = self.rule.name == "descent" and not config.optimizer.groups
        """Whether products of factors are added straight to the weights."""
        self.largest_band = BAND if self.multiplies else CACHED_BAND
        self.place = {shard.index: place for place, shard in enumerate(shards)}
        self.derives = len(published.regions) > 1
        """Whether something else that is published changes with the weights."""
        self.remembers = False
        """Whether each step can be taken back."""

    def start(self, shard: Shard, state: Mapping[str, np.ndarray] | Gathered) -> None:
        """Take over the weights of `shard`, and its optimizer state and running average if given, from flat vectors."""
        part = slice(shard.start, shard.stop)
        own = self.shard_copies[shard.index]
        own.weights[:] = state["weights"][part]
        own.whole = True
        if all(name in state for name in self.rule.states):
            for name, values in zip(self.rule.states, own.states, strict=True):
                values[:] = state[name][part]
            own.batches = float(state[BATCHES][part]) if BATCHES in state else 0.0
        if own.ema.size:
            own.ema[:] = state.get("ema", state["weights"])[part]
        self.derive(shard.index)

    def state(self) -> dict[str, dict[int, np.ndarray]]:
        """Return the arrays that a snapshot keeps, by name and shard."""
        kept = {"weights": self.published.weights}
        for number, name in enumerate(self.rule.states):
            kept[name] = {shard.index: self.shard_copies[shard.index].states[number] for shard in self.shards}
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
        call = KernelCall(self.rule.kernel)
        for band, messages, factors in works:
            if self.remembers:
                for shard in band:
                    self.shard_copies[shard.index].remember()
            if band[0].index in self.steps.frozen:
                continue
            if are_plain(messages, band_size(band)):
                gradients = [message.start for message in messages], self.scales(factors)
                self.steps.add(call, band[0].index, slice(None), gradients, self._counts(messages), rate)
            else:
                self._step_mixed(band, messages, self.scales(factors), rate)
        call.run(self.values.floats)
        if self.derives:
            for band, messages, _ in works:
                for shard in band:
                    self._update_derived(shard.index, self.count_images(messages))

    def step_folded(self, index: int, values: np.ndarray, rate: float, images: ImageCounts, partial: bool) -> None:
        """Take the steps of shard `index` on a folded gradient: the same bits on every server that has a copy.

        A `partial` gradient is NaN for parameters that stay as they are.
        """
        own = self.shard_copies[index]
        if self.remembers:
            own.remember()
        if values.size and partial:
            indices = np.flatnonzero(~np.isnan(values))
            self.steps.step_at(index, indices, values[indices], rate, images)
        elif values.size:
            self.steps.run(index, slice(None), values, ([0], [1.0]), [images], rate)
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
        """Return how many of `messages` for a shard of `size` may be one folded gradient, from the first on."""
        if not self.sums:
            return 1
        if self.stays:
            return len(messages)
        whole = [not is_partial(message, size) for message in messages]
        return max(1, [*whole, False].index(False))

    def scales(self, factors: Sequence[float]) -> list[float]:
        """Return what the values of messages are multiplied by, from the factors of late ones."""
        return [self.unit * factor for factor in factors]

    def derive(self, shard: int) -> None:
        """Update what is published beside the weights of `shard` and follows from them."""
        if shard in self.published.regions.get("short", ()):
            weights = self.published.weights[shard]
            bfloat16.shorten(weights.view(np.uint32), self.published.regions["short"][shard])

    def _counts(self, messages: Sequence[ReceivedMessage]) -> list[ImageCounts]:
        """Return the images of `messages`: together, or of each where each is taken in turn."""
        return [self.count_images(messages)] if self.sums else [self.count_images([message]) for message in messages]

    def _update_derived(self, index: int, images: ImageCounts) -> None:
        """Update what changes with the weights of shard `index`: the running average and the short weights."""
        own = self.shard_copies[index]
        if own.ema.size and images.ended:
            share = ema.ema_weight(self.config.optimizer, images.ended / self.batch)
            ema.update_ema(own.ema, own.weights, share)
        self.derive(index)

    def _step_mixed(
        self, band: Sequence[Shard], messages: Sequence[ReceivedMessage], scales: Sequence[float], rate: float
    ) -> None:
        """Step `band` on messages of any kind, those for the same run of parameters together where they are summed."""
        groups: dict[tuple[int, int, int], list[ScaledMessage]] = defaultdict(list)
        for number, (message, scale) in enumerate(zip(messages, scales, strict=True)):
            turn = 0 if self.sums else number
            if message.finite and message.kind == message_formats.SPARSE:
                self._step_sparse(band[0].index, message, rate, scale)
            elif message.finite and message.kind == message_formats.FACTOR:
                groups[turn, 0, band_size(band)].append((message, scale))
            elif message.finite:
                groups[turn, message.first, message.values].append((message, scale))
        for (_, first, values), scaled in groups.items():
            if self.multiplies and all(message.kind == message_formats.FACTOR for message, _ in scaled):
                self._multiply_into_weights(band, scaled, rate)
            else:
                self._step_dense(band, slice(first, first + values), scaled, rate)

    def _step_dense(self, band: Sequence[Shard], part: slice, scaled: list[ScaledMessage], rate: float) -> None:
        """Step the parameters `part` of `band`; plain messages are folded where they lie, others in a buffer."""
        counts = [self.count_images([message for message, _ in scaled])]
        if all(is_plain(message) for message, _ in scaled):
            gradients = [message.start for message, _ in scaled], [scale for _, scale in scaled]
            self.steps.run(band[0].index, part, self.values.floats, gradients, counts, rate)
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
            own = part if len(band) == 1 else slice(None)
            self.steps.run(shard.index, own, total, ([start], [scale]), counts, rate)
        self.values.pool.give_back(total)

    def _multiply_into_weights(self, band: Sequence[Shard], scaled: list[ScaledMessage], rate: float) -> None:
        """Multiply factors straight into the weights: without a state, the step is a sum."""
        weights = self.published.run(band)
        images = self.count_images([message for message, _ in scaled])
        rows = [self.steps.rows(shard.index, rate, images) for shard in band]
        shrink, gain = rows[0][0, :2]
        if shrink:
            kernels.shrink_weights(weights, shrink)
        plan = self.values.plan(band)
        for message, scale in scaled:
            plan.add_product(unpacked(message), message.values, band, -float(gain) * scale, weights)

    def _step_sparse(self, shard: int, message: ReceivedMessage, rate: float, scale: float) -> None:
        """Step the parameters that the (index, value) pairs of `message` name, and no others."""
        indices, values = self.values.pairs(message)
        scaled = values * np.float32(scale)
        self.steps.step_at(shard, indices, scaled, rate, self.count_images([message]))
