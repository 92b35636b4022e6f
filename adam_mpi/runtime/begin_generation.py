"""The beginning of a generation: all ranks agree on the recovery, make windows, and start or continue their roles."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from adam_mpi.base.errors import LostState
from adam_mpi.base.log import print_and_log
from adam_mpi.checkpoint import owner as ownership
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint import snapshot, stores
from adam_mpi.cluster import fence
from adam_mpi.cluster.control_messages import GoBack, Statistics
from adam_mpi.cluster.spares import JoinPackage
from adam_mpi.cluster.world import World, gather
from adam_mpi.data.served_phase import Resumed, ServedData
from adam_mpi.data.server import DataServer
from adam_mpi.data.sets import DataSet, open_set
from adam_mpi.model import parameters
from adam_mpi.model.network import Network
from adam_mpi.model.partition import partition
from adam_mpi.optimizer.schedules import Plateau
from adam_mpi.runtime import compile, going_back
from adam_mpi.runtime.agreement import keeps_store
from adam_mpi.runtime.coordinator import Coordinator
from adam_mpi.runtime.job import CoordinatorState, Job
from adam_mpi.runtime.rank_runtime import RankRuntime, Role
from adam_mpi.runtime.recovery import RecoveryPlan, newest_coordinator, order_to_follow, plan_recovery
from adam_mpi.runtime.role_setup import Setup, attempt_folder, available_cores, initial_residual, initial_state, set_up
from adam_mpi.server.server import Server
from adam_mpi.sharding.batches import BatchCuts, first_cuts
from adam_mpi.sharding.memory_layout import WorkerShards, cut_for
from adam_mpi.sharding.training_state import RankState
from adam_mpi.transport.conservation import ConservationRecorder
from adam_mpi.worker.gradient_buffer import worker_pool
from adam_mpi.worker.partitioned_replica import PartitionedReplica
from adam_mpi.worker.replica import Replica
from adam_mpi.worker.thread_replica import ThreadReplica
from adam_mpi.worker.worker import Worker

R = TypeVar("R")
SWITCH_SECONDS = 0.0005
log = logging.getLogger(__name__)


def begin_generation(world: World, job: Job, previous: RankRuntime | None = None) -> RankRuntime:
    """Return the runtime of this rank in the generation of `world`; collective.

    Its roles continue those of `previous`, the runtime of the generation before, where the rank keeps them. `previous`
    is None in the first generation. Raise LostState if the job cannot continue, RankFailure if another rank is lost.
    """
    if previous is None:
        world.injector.announce()
        world.injector.at("start")
        setup = set_up(world, job, None, ())
        previous = RankRuntime.without_roles(world)
        return _start_roles(setup, previous, previous.pushed)
    abandoned = previous.abandon()
    pusher = previous.roles.get("worker")
    states = gather(world.comm, previous.export_state(world.place.member))
    order = order_to_follow(states)
    if order is not None:
        # Whoever knew it first may be lost before the generation has begun.
        previous.order = order
        runtime = _go_back(world, job, previous, order, newest_coordinator([state.coordinator for state in states]))
        runtime.abandoned = abandoned
        return runtime
    restart = max((state.restart for state in states if state.restart), key=lambda point: point.number, default=None)
    job = going_back.adapt(world, job, restart)
    plan = _plan_recovery(world, job, states)
    _keep_ownership(world, job)
    # This comes first: another rank may be lost before the generation has begun.
    previous.cuts = plan.cuts
    pushed = _retire_worker(world, previous, plan)
    setup = set_up(world, job, plan, previous.roles)
    if world.rank == world.layout.coordinator:
        _record_generation(world, job)
    runtime = _start_roles(setup, previous, pushed)
    runtime.abandoned = abandoned
    runtime.restart = restart
    if pusher is not None and "worker" not in runtime.roles:
        # These are its last statistics: it pushes no more.
        runtime.channel.send(Statistics(pusher.stats()), world.layout.coordinator)
    return runtime


def _go_back(world: World, job: Job, previous: RankRuntime, order: GoBack, state: dict[str, Any] | None) -> RankRuntime:
    """Return the runtime of this rank in a generation that begins from an earlier state of training; collective.

    All roles are new, as in a job that resumes; only the data set stays open. `state` is that of the last coordinator.
    """
    assert state is not None, "an order to go back comes with the state of the coordinator"
    _keep_ownership(world, job)
    restart = going_back.agree_on_restart_point(world, job, order)
    job = going_back.adapt(world, job, restart)
    for role in previous.roles.values():
        role.end()
    setup = set_up(world, job, None, ())
    if world.rank == world.layout.coordinator:
        _record_generation(world, job)
    kept = replace(previous, roles={name: role for name, role in previous.roles.items() if name == "data"})
    runtime = _start_roles(setup, kept, (0, 0, 0.0), CoordinatorState.from_json(state))
    runtime.restart = restart
    return runtime


def _plan_recovery(world: World, job: Job, states: Sequence[RankState]) -> RecoveryPlan:
    """Return the recovery plan of a generation from the states of all ranks; raise LostState if there is none."""
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    shards = cut_for(parameters.tensors(job.shapes), job.replicas * world.layout.partitions, job.config, cut)
    try:
        return plan_recovery(states, world.layout, shards, job.config.server.copies, job.config.consistency.staleness)
    except LostState as loss:
        gone = "; ".join(f"{place} died" for place in world.lost)
        raise LostState(f"{gone}; {loss}; the job ends; --resume continues from what is stored") from None


def _keep_ownership(world: World, job: Job) -> None:
    """Raise LostRun when a generation begins in a run of another job; else record this job's ranks (collective)."""
    processes = gather(world.comm, ownership.this_process())
    job.owner.check()
    if world.rank == world.layout.coordinator:
        job.owner.update_processes(processes)


def _record_generation(world: World, job: Job) -> None:
    """Write which members the beginning generation has, and describe its stores; raise Evicted if others began it."""
    members = [place.member for place in world.layout.places]
    try:
        fence.claim(job.directory / "log", world.generation, members)
    except OSError as error:
        number = world.generation
        print_and_log(f"warning: {job.directory}: {error.strerror}; generation {number} continues without its file")
    if keeps_store(job.config):
        with suppress(OSError):
            folder = attempt_folder(job, world.generation)
            total = parameters.total(job.shapes)
            resume_points.describe_store(folder, job.config, job.replicas, total, job.identity)


def _start_roles(
    setup: Setup, previous: RankRuntime, pushed: tuple[int, int, float], before: CoordinatorState | None = None
) -> RankRuntime:
    """Return the runtime with the roles of this rank, new or from `previous`; collective.

    `pushed` are the pushes of this rank as another worker before; see RankRuntime. `before` is the state of the
    coordinator before all ranks have gone back to an earlier state of training.
    """
    world = setup.world
    generation = setup.generation
    plan = setup.recovery
    roles: dict[str, Role] = {}
    coordinator = None
    if "data" in world.place.roles:
        data = _data_role(setup, _previous_role(previous, "data", DataServer), previous.data)
        roles["data"] = data
        if world.rank == world.layout.coordinator:
            coordinator = Coordinator(generation, data, setup.job, plan, previous.coordinator, before)
    if "server" in world.place.roles:
        roles["server"] = _server_role(setup, _previous_role(previous, "server", Server))
    # Workers read weights at once: all servers must have them in place.
    world.wait(world.comm.Ibarrier().Test, "all ranks to start", compile.SECONDS)
    windows = generation.windows
    if world.layout.partitions > 1:
        # The strips of each replica make a window of their own.
        world.agree()
    if "worker" in world.place.roles:
        worker = _worker_role(setup, setup.network, _previous_role(previous, "worker", Worker), pushed)
        roles["worker"] = worker
        windows.extend(worker.replica.windows)
    world.started = True
    world.spares.begin_generation(JoinPackage(setup.job, setup.captured))
    state = None if plan is None or plan.coordinator is None else CoordinatorState.from_json(plan.coordinator)
    return RankRuntime(
        channel=generation.channel,
        roles=roles,
        coordinator=coordinator,
        windows=windows,
        coordinator_state=state or before,
        captured=setup.captured,
        cuts=_batch_cuts(setup),
        pushed=pushed,
        spares=world.spares,
    )


def _previous_role(runtime: RankRuntime, name: str, kind: type[R]) -> R | None:
    """Return the role `name` that `runtime` has in the previous generation, if any."""
    role = runtime.roles.get(name)
    assert role is None or isinstance(role, kind), f"{role} is not a {kind.__name__}"
    return role


def _batch_cuts(setup: Setup) -> BatchCuts | None:
    """Return how joint batches are cut from this generation on, where replicas are bound by clocks."""
    if setup.recovery is not None:
        return setup.recovery.cuts
    if setup.job.config.asynchronous:
        return None
    layout = setup.world.layout
    position = setup.position
    replicas = {layout.places[rank].member: layout.places[rank].replica or 0 for rank in layout.workers}
    return first_cuts(position.batches, position.epoch, replicas)


def _retire_worker(world: World, kept: RankRuntime, recovery: RecoveryPlan) -> tuple[int, int, float]:
    """End a worker that this generation gives another strip or none; return the numbers of its pushes."""
    worker = _previous_role(kept, "worker", Worker)
    if worker is None or worker.strip is None or worker.strip == world.place.strip:
        return kept.pushed
    worker.retire(recovery.clock, recovery.taken.get(world.place.member, {}))
    del kept.roles["worker"]
    return worker.pushes.sent, worker.pushes.completed, worker.left_behind


def _data_role(setup: Setup, kept: DataServer | None, opened: DataSet | None) -> DataServer:
    """Return a data server for the beginning generation; what `kept` serves throughout the job is taken over."""
    job, recovery = setup.job, setup.recovery
    served = kept.served if kept else _served_data(job, opened)
    resumed = Resumed(setup.position)
    if recovery is not None:
        resumed = Resumed(setup.position, frozenset(recovery.out), recovery.mean, recovery.left)
    return DataServer(setup.world, setup.generation.channel, served, resumed)


def _served_data(job: Job, opened: DataSet | None) -> ServedData:
    """Return what a data rank serves throughout the job, from the data set that is `opened` or is opened now."""
    return ServedData(opened or open_set(job.config.data), job.config, job.replicas, job.metrics)


def _server_role(setup: Setup, kept: Server | None) -> Server:
    """Return the server role of this rank in the beginning generation, `kept` or new."""
    world, recovery, job = setup.world, setup.recovery, setup.job
    plan = setup.generation.memory_layout
    if kept is None:
        kept = Server(setup.generation, job.description.train, setup.position)
        # A thread that writes wants the interpreter often and briefly; it should not wait 5 ms each time.
        sys.setswitchinterval(SWITCH_SECONDS)
    kept.progress.rate_scale = _rate_scale(setup)
    if recovery is None:
        kept.start(initial_state(job, [(own.shard.start, own.shard.stop) for own in kept.shard_copies.values()]))
    else:
        kept.discard([shard for rank, shard in recovery.stale if rank == world.rank])
        kept.rewind(setup.position, recovery.version, max(recovery.clocks.values()))
        kept.begin(setup.generation, recovery.clocks, recovery.lacking, recovery.acknowledged)
        # A snapshot takes in all that is sent again: shards may have it already.
        session = kept.session
        session.barrier.begun = [recovery.begun[member] for member in session.push_queue.members]
    if keeps_store(job.config) and plan.served[world.rank]:
        folder = attempt_folder(job, world.generation)
        forget = partial(stores.remove_earlier_attempts, folder, job.identity, job.owner)
        kept.open_store(folder / snapshot.file_name(world.place.member), forget)
    return kept


def _rate_scale(setup: Setup) -> float:
    """Return what the schedule plateau multiplies the learning rate by when the generation begins."""
    if setup.recovery is not None:
        return Plateau(**(setup.recovery.coordinator or {}).get("plateau", {})).scale
    return Plateau(**(setup.job.resume.plateau if setup.job.resume else {})).scale


def _worker_role(setup: Setup, net: Network | None, kept: Worker | None, pushed: tuple[int, int, float]) -> Worker:
    """Return this rank's worker in the beginning generation, `kept` or new; `pushed`: see RankRuntime."""
    recovery = setup.recovery
    member = setup.world.place.member
    if kept is not None:
        assert recovery is not None, "a worker is kept in a recovery only"
        clock = recovery.clock if kept.strip is None else recovery.clocks[member]
        kept.cut_by(recovery.cuts)
        kept.begin_generation(setup.generation, clock, recovery.taken.get(member, {}))
        return kept
    assert net is not None, "a new worker has a network"
    log.info("cores %d, trainer threads %d", len(available_cores()), setup.threads)
    worker = _new_worker(setup, net)
    if recovery is not None:
        worker.pushes.sent, worker.pushes.completed, worker.left_behind = pushed
        worker.pushes.clock = recovery.clocks[member]
    worker.cut_by(_batch_cuts(setup))
    if setup.job.config.inject.conserve:
        worker.pushes.conserve(ConservationRecorder(setup.job.directory, member, setup.job.config.train.batch))
    return worker


def _new_worker(setup: Setup, net: Network) -> Worker:
    """Return a new worker of the generation that computes `net`, a model or a strip; collective over its replica."""
    world = setup.world
    config = setup.job.config
    memory_layout = setup.generation.memory_layout
    cut = partition(setup.job.shapes, memory_layout.strips, config.layout.scheme) if net.strip is not None else None
    worker_shards = WorkerShards(memory_layout, cut, world.place.strip or 0)
    pool = worker_pool(config, worker_shards, setup.threads, net.captured)
    replica: Replica
    if cut is not None:
        replica = PartitionedReplica(
            world,
            net,
            setup.threads,
            pool=pool,
            partition=cut,
            metrics=setup.job.metrics,
            fields=setup.job.description.fields,
        )
    else:
        replica = ThreadReplica(
            config,
            net,
            setup.threads,
            pool=pool,
            injector=world.injector,
            metrics=setup.job.metrics,
            fields=setup.job.description.fields,
        )
    carried = initial_residual(world, setup.job, worker_shards) if setup.recovery is None else None
    return Worker(setup.generation, replica, pool, worker_shards, carried)
