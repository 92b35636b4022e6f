"""Joint batches whose replicas are lost: every image of an epoch is trained on once, or counted as skipped."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.config import load
from adam_mpi.data.epoch import Order
from adam_mpi.runtime.recovery import plan_recovery
from adam_mpi.server.progress import ServerProgress
from adam_mpi.sharding.batches import BatchCuts, BatchRemainder, Progress, begun, first_cuts, resume_batches
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Phase, Position, RankState, batch_id

BATCHES, IMAGES, STALENESS = 12, 10, 3
ORDER = Order(Phase(0, "train", 1), BATCHES * IMAGES, IMAGES, 0)


class Job:
    """Simulates an epoch: workers push in any order within the bound, servers apply later, any worker may be lost."""

    def __init__(self, seed, workers=3, epoch=1, clock=0):
        self.random = random.Random(seed)
        self.epoch = epoch
        self.batches = np.zeros(BATCHES + 4, bool)
        self.cuts = BatchCuts(epoch, clock, ((clock, {worker: worker for worker in range(workers)}),))
        self.next = dict.fromkeys(range(workers), clock)
        self.reached = [dict(self.next), dict(self.next)]
        """What each of two servers has applied of each worker."""
        self.pushes = {}
        """(clock, worker) -> the share that was pushed; no clock of a worker may be pushed twice."""
        self.born = workers
        self.left = {}

    @property
    def over(self):
        return all(clock == self.cuts.base + BATCHES for clock in self.next.values())

    def step(self):
        """Let a worker push, or a server apply the next push of one."""
        worker, server = self.random.choice(list(self.next)), self.random.choice(self.reached)
        least = min(min(reached[other] for other in self.next) for reached in self.reached)
        clock = self.next[worker]
        if self.random.random() < 0.5 and clock < self.cuts.base + BATCHES and clock <= least + STALENESS:
            assert (clock, worker) not in self.pushes, "a clock was pushed twice"
            self.pushes[clock, worker] = self.cuts.piece(clock, worker)
            self.next[worker] += 1
        elif server[worker] < clock:
            self.batches[server[worker] - self.cuts.base] = True
            server[worker] += 1

    def lose(self, losses, joins):
        """Lose and add workers; of what the dead have pushed, only what both servers have is in the weights."""
        for worker in self.random.sample(list(self.next), min(losses, len(self.next) - 1)):
            end = min(reached[worker] for reached in self.reached)
            self.pushes = {key: piece for key, piece in self.pushes.items() if key[1] != worker or key[0] < end}
            del self.next[worker]
        known = {worker: self._progress(worker) for worker in self.next}
        known |= {100 + place: Progress(self.cuts, reached=dict(at)) for place, at in enumerate(self.reached)}
        for _ in range(joins):
            known[self.born] = Progress()
            self.born += 1
        workers = [*self.next, *range(self.born - joins, self.born)]
        replicas = {worker: replica for replica, worker in enumerate(workers)}
        self.cuts, self.left = resume_batches(known, replicas, self.batches, self.epoch, keep=True)
        new = self.cuts.layouts[-1][0]
        self.next = {worker: self.next.get(worker, new) for worker in workers}
        # Servers know only the living, and what these have pushed is sent again.
        ends = {worker: min(at.get(worker, new) for at in self.reached) for worker in workers}
        self.reached = [dict(ends), dict(ends)]

    def _progress(self, worker):
        end = min(reached[worker] for reached in self.reached)
        numbers = range(end - self.cuts.base, self.next[worker] - self.cuts.base)
        pushed = {n: self._size(n, self.cuts.piece(self.cuts.base + n, worker)) for n in numbers}
        return Progress(self.cuts, self.next[worker], (self.epoch, self.cuts.base), pushed)

    @staticmethod
    def _size(number, piece):
        return ORDER.share(number, *piece).size

    def counted(self):
        """Return how often each image of the epoch is in a share that was pushed, or is lost."""
        times = np.zeros(BATCHES * IMAGES, int)
        pieces = [(clock, piece) for (clock, _), piece in self.pushes.items()]
        lost = {(clock, self.cuts.piece(clock, worker)) for clock, worker in self.cuts.lost}
        for clock, piece in [*pieces, *lost]:
            times[ORDER.share(clock - self.cuts.base, *piece)] += 1
        return times


@pytest.mark.parametrize("seed", range(200))
def test_every_image_is_in_a_push_once_or_counted_as_lost(seed):
    job = Job(seed, clock=7 * (seed % 3))
    while not job.over:
        job.step()
        if job.random.random() < 0.02:
            job.lose(job.random.randint(0, 2), job.random.choice((0, 0, 1)))
    assert np.array_equal(job.counted(), np.ones(BATCHES * IMAGES))


@pytest.mark.parametrize("seed", range(50))
def test_what_is_left_of_a_batch_is_what_is_not_done_of_it(seed):
    job = Job(seed)
    for _ in range(60):
        job.step()
    done = {key for key in job.pushes if all(reached[key[1]] > key[0] for reached in job.reached)}
    job.lose(1, 0)
    for number in range(begun(job.batches)):
        rest = job.left.get(number, BatchRemainder(0, (), ()))
        known = sum(job._size(number, job.pushes[key]) for key in done if key[0] == job.cuts.base + number)
        left = rest.pushed + sum(job._size(number, piece) for piece in (*rest.due, *rest.lost))
        assert left + known == IMAGES, (number, rest, known)


def test_nothing_is_lost_with_a_data_rank():
    job = Job(5)
    while begun(job.batches) < 6:
        job.step()
    job.lose(0, 0)
    assert not job.cuts.lost and all(not rest.lost for rest in job.left.values())
    assert job.cuts.layouts[-1][0] == job.cuts.base + begun(job.batches)


def test_an_epoch_that_only_the_dead_had_begun_begins_where_the_others_are():
    cuts = first_cuts(np.zeros(BATCHES, bool), 1, {0: 0, 1: 1})
    batches = np.zeros(BATCHES, bool)
    batches[:2] = True
    known = {1: Progress(cuts, 12, (1, 0)), 2: Progress(cuts, reached={0: 14, 1: 12})}
    made, left = resume_batches(known, {1: 0}, batches, 2, keep=True)
    assert (made.epoch, made.base, made.layouts[-1]) == (2, 12, (14, {1: 0}))
    assert left == {0: BatchRemainder(0, ((1, 2),), ()), 1: BatchRemainder(0, ((1, 2),), ())}


def test_strips_keep_nothing_that_servers_do_not_have():
    cuts = first_cuts(np.zeros(BATCHES, bool), 1, {0: 0, 1: 0, 2: 1, 3: 1})
    batches = np.zeros(BATCHES, bool)
    batches[:3] = True
    strips = {worker: Progress(cuts, None, (1, 0)) for worker in (0, 1, 2)}
    known = strips | {9: Progress(cuts, reached={0: 3, 1: 3, 2: 2, 3: 2})}
    made, left = resume_batches(known, {0: 0, 1: 0}, batches, 1, keep=False)
    assert made.layouts[-1] == (3, {0: 0, 1: 0}) and left == {2: BatchRemainder(0, (), ((1, 2),))}


def test_the_clock_of_synchronous_training_leaves_no_batch_partly_done():
    cuts, batches = first_cuts(np.zeros(BATCHES, bool), 1, {0: 0, 1: 1}), np.zeros(BATCHES, bool)
    batches[:4] = True
    known = {0: Progress(cuts, 5, (1, 0), {4: 5}), 2: Progress(cuts, reached={0: 4, 1: 4})}
    made, left = resume_batches(known, {0: 0}, batches, 1, keep=True, clock=4)
    assert made.layouts[-1][0] == 4 and left == {} and begun(batches) == 4


def states(cuts):
    """Return states of two replicas, one with pushes under way and one behind, and of a server; a third is lost."""
    shards = [Shard(0, "dense1", 0, 10)]
    position = Position(BATCHES, 1, 60)
    position.batches[:6] = True
    reached = {1: 4, 2: 5, 3: 5}
    server = RankState(0, 1.0, {0: 9}, positions={0: position}, progress=Progress(cuts, reached=reached))
    fast = RankState(
        1, 1.0, clock=3, resent=((3, 4), (4, 4), (5, 4)), batches=frozenset(batch_id(1, n) for n in (3, 4, 5))
    )
    fast.progress = Progress(cuts, 6, (1, 0), {3: 4, 4: 4, 5: 4})
    slow = RankState(2, 1.0, clock=4, progress=Progress(cuts, 4, (1, 0)))
    places = [Place(0, "h", ("server",)), Place(1, "h", ("worker",), 0, 0), Place(2, "h", ("worker",), 1, 0)]
    return [server, fast, slow], Layout(tuple(places), 1), shards


def test_with_a_bound_replicas_continue_where_they_are_and_no_clock_is_pushed_twice():
    cuts = first_cuts(np.zeros(BATCHES, bool), 1, {1: 0, 2: 1, 3: 2})
    known, layout, shards = states(cuts)
    plan = plan_recovery(known, layout, shards, 1, 3.0)
    assert plan.clock == 6 and plan.clocks == {1: 3, 2: 4} and plan.begun == {1: 6, 2: 4}
    assert plan.position.count == 6 and plan.out == frozenset()
    due, lost = (1, 3), (2, 3)
    assert plan.left == {
        3: BatchRemainder(4, (), ()),
        4: BatchRemainder(4, (due,), ()),
        5: BatchRemainder(4, (due,), (lost,)),
    }
    # The server has counted a push that is sent again.
    assert plan.position.images == 60 - 4


def test_in_asynchronous_training_there_are_no_joint_batches():
    known, layout, shards = states(None)
    plan = plan_recovery(known, layout, shards, 1, math.inf)
    assert plan.cuts is None and not plan.left and plan.out == {3, 4, 5} and plan.begun == {1: 6, 2: 4}


def test_steps_of_copies_do_not_change_the_position_of_a_snapshot():
    """Other servers continue when they have written their part of it, and send us what they apply."""
    progress = ServerProgress(load(None, ["consistency.staleness=3"]), Position(BATCHES, 1, 64), 640)
    progress.note_copy_step(SimpleNamespace(sequence=1, images=32), np.array([batch_id(1, 4)]))
    assert progress.position.count == 0
    state = RankState(0)
    progress.export_state(state)
    known = [(position.batches.nonzero()[0].tolist(), position.images) for position in state.positions.values()]
    assert known == [([], 64), ([4], 64)]
