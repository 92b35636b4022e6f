"""A server during one generation: takes pushes, steps its shards on them, replicates, acknowledges and publishes.

The functions are in the order in which a push passes them; `server.py` lists them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from adam_mpi.base import trace
from adam_mpi.base.errors import LostState
from adam_mpi.base.log import format_ranges
from adam_mpi.base.pools import ThreadPool
from adam_mpi.checkpoint.disk_task import disk_seconds
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.cluster.shared_memory import memory_fence
from adam_mpi.server import session_parts
from adam_mpi.server.clipped_clocks import ClippedClocks
from adam_mpi.server.delays import PushDelays
from adam_mpi.server.folded_gradient import FoldedGradient
from adam_mpi.server.progress import PusherClocks, ServerProgress
from adam_mpi.server.push_queue import StagedMessages
from adam_mpi.server.replication_messages import Record, notes
from adam_mpi.server.stepper import Work
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.memory_layout import MOST_BATCHES, RECORD_BATCHES
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights, lacking_acknowledged, place_copies

MOST_FOLDED = RECORD_BATCHES // MOST_BATCHES
"""Messages of one step that a record for other copies has room for."""


class ServerSession:
    """What a server has for one generation: its published weights, push queue, stepper, replicator and clocks."""

    def __init__(
        self,
        generation: Generation,
        shard_copies: Mapping[int, ShardCopy],
        progress: ServerProgress,
        thread_pool: ThreadPool,
        *,
        clocks: Mapping[int, int],
        lacking: Sequence[tuple[int, int]],
        acknowledged: Mapping[int, int],
    ) -> None:
        """Begin with the `shard_copies` of the generation before; see `Server.begin` for the other parameters."""
        self.generation = generation
        self.world = generation.world
        self.memory_layout = generation.memory_layout
        self.progress = progress
        self.thread_pool = thread_pool
        self.mailbox_window = generation.mailbox_window
        self.weights_window = generation.weights_window
        rank = self.world.rank
        self.shards = self.memory_layout.served[rank]
        self.place = {shard.index: place for place, shard in enumerate(self.shards)}
        self.published = PublishedWeights(self.memory_layout, rank, self.weights_window.memory)
        self.shard_copies = place_copies(self.published, self.memory_layout, rank, shard_copies)
        behind = {shard for server, shard in lacking if server == rank}
        for index, own in self.shard_copies.items():
            own.behind = index in behind
        self.push_queue = session_parts.push_queue(self)
        self.began: dict[int, dict[int, int]] = defaultdict(dict)
        """Strip -> pusher -> the last of its pushes that was acknowledged when the generation began."""
        for ring, pusher in enumerate(self.push_queue.members):
            self.began[ring % self.memory_layout.strips][pusher] = acknowledged.get(pusher, 0)
        if short := lacking_acknowledged(self.memory_layout, self.shards, self.shard_copies, self.began):
            raise LostState(f"{self.world.place}: shards {format_ranges(short)} lack acknowledged pushes; the job ends")
        self.stepper = session_parts.stepper(self)
        self.delays = PushDelays(self.world.config)
        self.replicator = session_parts.replicator(self, lacking)
        self.clipped = session_parts.clipped_clocks(self)
        known = [clocks.get(pusher, 0) for pusher in self.push_queue.members]
        names = [self.push_queue.pusher(ring) for ring in range(len(known))]
        self.clocks = PusherClocks(self.memory_layout, rank, known, names)
        writing = partial(self.world.injector.at, "snapshot")
        self.barrier = SnapshotBarrier(len(known), disk_seconds(self.world.config), writing)
        self.barrier.begun = known
        most_folded = MOST_FOLDED if self.replicator is not None else None
        self.staged = StagedMessages(self.memory_layout, self.barrier, self.stepper, most_folded)
        self.store: WriteBehind | None = None
        self._show_progress()

    def collect_pushes(self) -> list[ReceivedMessage]:
        """Return the messages that have arrived."""
        self.mailbox_window.sync()
        self.weights_window.sync()
        arrived = self.push_queue.collect_accepted()
        # Between seeing that messages are there and reading them.
        self.mailbox_window.sync()
        return arrived

    def stage(self, message: ReceivedMessage) -> None:
        """Stage `message` for its shards: factors are for all shards of a layer that are served here, others for one.

        Shards that have it already, because it was sent again, only wait until another copy has it too.
        """
        message.pending = len(message.targets) + len(message.known)
        if self.clipped is not None:
            self.clipped.open_message(message)
        if message.targets and message.kind == message_formats.FACTOR:
            layer = self.memory_layout.shards[message.shard].layer
            self.stepper.values.unpack(message, self.push_queue.factors[layer])
        self.staged.stage(message)
        for shard in message.known:
            if self.replicator is None:
                self._complete(message)
            else:
                self.replicator.when_safe(shard, partial(self._complete, message))

    def apply_staged(self) -> bool:
        """Step the shards whose messages can be applied now; return whether there were any."""
        ready = self.staged.take_ready()
        if ready:
            with trace.span("apply"):
                self._apply(ready) if self.clipped is None else self._hold(ready, self.clipped)
        held = [] if self.clipped is None else self.clipped.take()
        if held:
            with trace.span("apply"):
                self._apply_held(held)
        return bool(ready) or bool(held)

    def _hold(self, ready: Mapping[int, list[ReceivedMessage]], clipped: ClippedClocks) -> None:
        """Sum the messages of each shard, on all apply threads, and free their slots but for the last one of a push."""
        rate = self._rate(ready)
        works = self._works(ready, rate)
        rate *= self.world.injector.rate_factor()
        folds = [FoldedGradient(work, rate) for work in works]
        self.thread_pool.run((_apply_thread(fold.band), partial(fold.fold, self.stepper)) for fold in folds)
        for message in (message for messages in ready.values() for message in messages):
            message.ids = self.push_queue.batches(message).copy()
            message.summed += 1
            # A snapshot has this clock on all servers, or on none.
            self.barrier.begun[message.ring] = max(self.barrier.begun[message.ring], message.clock + 1)
            if message.summed == len(message.targets) and not message.last:
                self.push_queue.free_slot(message)
                self.stepper.values.release(message)
                message.freed = True
        clipped.hold(next(iter(ready.values()))[0].clock, folds)

    def _apply_held(self, folds: Sequence[FoldedGradient]) -> None:
        """Take the step of each shard on its clipped gradient, on all apply threads; then record the steps."""
        self.world.injector.at("apply")
        self.thread_pool.run((_apply_thread(fold.band), partial(fold.step, self.stepper)) for fold in folds)
        ready = {shard.index: list(fold.messages) for fold in folds for shard in fold.band}
        self._record_steps(ready, {shard.index: fold for fold in folds for shard in fold.band}, folds[0].rate)

    def _apply(self, ready: Mapping[int, list[ReceivedMessage]]) -> None:
        """Take one optimizer step of each shard on its messages, on all apply threads; then record the steps."""
        self.world.injector.at("apply")
        rate = self._rate(ready)
        works = self._works(ready, rate)
        # Late pushes are scaled by the scheduled rate: they would take an injected fault back.
        rate *= self.world.injector.rate_factor()
        folds: dict[int, FoldedGradient] = {}
        if self.replicator is None:
            threads = self.world.config.server.threads
            shares: dict[int, list[Work]] = defaultdict(list)
            for work in works:
                shares[_apply_thread(work[0]) % threads].append(work)
            self.thread_pool.run((owner, partial(self.stepper.step, share, rate)) for owner, share in shares.items())
        else:
            made = [FoldedGradient(work, rate) for work in works]
            folds = {shard.index: fold for fold in made for shard in fold.band}
            self.thread_pool.run((_apply_thread(fold.band), partial(fold.fold_and_step, self.stepper)) for fold in made)
        self._record_steps(ready, folds, rate)

    def _record_steps(
        self, ready: Mapping[int, list[ReceivedMessage]], folds: Mapping[int, FoldedGradient], rate: float
    ) -> None:
        """Record the steps of shards on the messages in `ready`, and send them to other copies."""
        # Between the weights and the versions that promise them. A call into MPI might raise that a rank is lost: then
        # the step would be in the weights and in no table, and be taken again when its pushes are sent again.
        memory_fence()
        for shard, messages in ready.items():
            self._record_step(shard, messages)
            self._replicate(shard, messages, folds.get(shard), rate)
        self._publish_stepped(ready)
        self.progress.counts["steps"] += len(ready)
        self.progress.counts["folded"] += sum(map(len, ready.values()))
        if self.store is not None:
            self.store.mark_dirty(len(self.shards))
        self.world.injector.at("applied")

    def _publish_stepped(self, ready: Mapping[int, list[ReceivedMessage]]) -> None:
        """Publish which messages are in the weights now: their pushers neither predict nor wait for them any more."""
        for messages in ready.values():
            for message in messages:
                self.push_queue.count_step(message)
        self.push_queue.stepped.publish()

    def _rate(self, ready: Mapping[int, list[ReceivedMessage]]) -> float:
        """Return the scheduled learning rate of the steps on `ready`."""
        shard, messages = next(iter(ready.items()))
        version = self.shard_copies[shard].version + 1
        return self.progress.rate_of(version, self.push_queue.batches(messages[0]), _pushed_images(messages))

    def _works(self, ready: Mapping[int, list[ReceivedMessage]], rate: float) -> list[Work]:
        """Return the steps to take at the learning rate `rate`, with what each message is multiplied by."""
        works: list[Work] = []
        for band in self.stepper.bands(ready):
            messages = ready[band[0].index]
            version = self.shard_copies[band[0].index].version
            delays = [self.delays.measure(shard.index, version, messages) for shard in band][0]
            for delay in delays:
                self.progress.delays[round(delay)] += len(band)
            self.progress.counts["late"] += self.delays.drop(messages, delays)
            works.append((band, messages, [self.delays.factor(delay, rate) for delay in delays]))
        return works

    def _record_step(self, shard: int, messages: Sequence[ReceivedMessage]) -> None:
        """Record that `shard` has been stepped on `messages`: its version, its table, and clocks."""
        own = self.shard_copies[shard]
        own.version += 1
        self.published.versions[self.place[shard]] = own.version
        begun = self.barrier.begun
        for message in messages:
            own.note(message.pusher, message.number)
            self.clocks.note_applied(message.ring)
            begun[message.ring] = max(begun[message.ring], message.clock + 1)
            if message.last and message.shard == shard:
                trace.receives((message.pusher, message.sequence, self.world.rank))
        if self.store is not None:
            self.store.mark_dirty(self.place[shard])

    def _replicate(self, shard: int, messages: list[ReceivedMessage], fold: FoldedGradient | None, rate: float) -> None:
        """Send the step of `shard` to its other copies; its messages are complete when all of them have taken it."""
        if self.replicator is None or fold is None:
            self._complete_all(messages, fold)
            return
        own = self.shard_copies[shard]
        numbers = {message.pusher: own.table[message.pusher] for message in messages}
        record = Record(
            shard=own.shard,
            version=own.version,
            rate=rate,
            values=fold.values(shard),
            notes=notes(numbers, [self.push_queue.batches(message) for message in messages]),
            done=partial(self._complete_all, messages, fold),
            images=_pushed_images(messages),
            image_counts=fold.image_counts,
            partial=fold.partial,
        )
        self.replicator.send(record)

    def step_replicator(self) -> bool:
        """Exchange records with other servers; return whether anything was done."""
        if self.replicator is None:
            return False
        with trace.span("replicate"):
            return self.replicator.step()

    def _complete_all(self, messages: Sequence[ReceivedMessage], fold: FoldedGradient | None = None) -> None:
        """Count one shard of each message whose copies all have it."""
        for message in messages:
            self._complete(message)
        if fold is not None:
            fold.release_shard(self.stepper)

    def _complete(self, message: ReceivedMessage) -> None:
        """Count one shard of `message` whose copies all have it; with the last shard, free its slot and advance."""
        message.pending -= 1
        if message.pending > 0:
            return
        for finished in [message] if self.clipped is None else self.clipped.finished(message):
            if not finished.freed:
                self.push_queue.free_slot(finished)
                self.stepper.values.release(finished)
            self.progress.advance(finished, self.push_queue.batches(finished), self.clocks)

    def publish(self) -> None:
        """Publish acknowledgements of complete messages: after the weights that they changed, before the clock."""
        if not self.push_queue.has_unacknowledged:
            return
        self.weights_window.sync()
        if self.store is not None:
            self.store.note_acknowledged(self.progress.counts["applied"], self.progress.position.images)
        self.push_queue.acknowledge_freed()
        self._show_progress()
        self.weights_window.sync()

    def _show_progress(self) -> None:
        """Publish the learning rate and the clock that all pushers have reached."""
        self.published.rate[0] = self.progress.rate
        self.published.clock[0] = self.clocks.slowest

    def set_rate_scale(self, scale: float) -> None:
        """Multiply the scheduled learning rate by `scale` from now on."""
        self.progress.rate_scale = scale
        self.published.rate[0] = self.progress.rate

    def close(self) -> None:
        """End the session: drop messages to other servers, and end the store, which gets no more."""
        if self.replicator is not None:
            self.replicator.drop()
        if self.store is not None:
            self.store.end()


def _pushed_images(messages: Sequence[ReceivedMessage]) -> int:
    """Return how many images' gradients are in `messages`; those of a push in several parts count once."""
    return sum(message.images for message in messages if message.part == 0)


def _apply_thread(band: Sequence[Shard]) -> int:
    """Return a number that says, modulo the number of threads, which thread always steps this band."""
    return band[0].index // len(band)
