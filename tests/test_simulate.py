"""The simulated job: limits that arithmetic gives, staleness and stragglers."""

import json
import sys
from collections import Counter

import pytest

simpy = pytest.importorskip("simpy", reason="pip install simpy")

from adam_mpi import cli, config  # noqa: E402
from adam_mpi.cluster.layout import arrange  # noqa: E402
from adam_mpi.data.sets import describe  # noqa: E402
from adam_mpi.model import parameters  # noqa: E402
from adam_mpi.planning.plan import model  # noqa: E402
from adam_mpi.simulate import prediction  # noqa: E402
from adam_mpi.simulate.hosts import EAGER, LOOKS, SLICES, Cluster, Host, Rank, Steps  # noqa: E402
from adam_mpi.simulate.load import replica_load  # noqa: E402
from adam_mpi.simulate.prediction import predict_job  # noqa: E402
from adam_mpi.simulate.roles import rank_generator  # noqa: E402

NOTHING = 1e-15  # 0 would be measured


def cluster(hosts: int, ranks: int, cores: int, **costs: float) -> Cluster:
    """Return machines on which only the given costs take time."""
    made = Cluster()
    made.hosts.count = hosts
    made.hosts.ranks = ranks
    made.hosts.cores = cores
    made.links.latency = 0.0
    made.variation.spread = 0.0
    for name, usual in vars(made.costs).items():
        setattr(made.costs, name, costs.get(name, 0.0 if usual else NOTHING))
    return made


def test_cores_that_only_compute_are_the_limit() -> None:
    settings = config.load(None, ["layout.data=1", "layout.servers=1", "worker.threads=1"])
    predicted = predict_job(cluster(1, 5, 8, image=1e-4), settings)
    assert predicted.replicas == 3
    assert predicted.images_per_second == pytest.approx(3 / 1e-4, rel=0.02)


def test_more_threads_than_cores_share_them() -> None:
    settings = config.load(None, ["layout.data=1", "layout.servers=1", "worker.threads=2"])
    predicted = predict_job(cluster(1, 4, 2, image=1e-4), settings)
    assert predicted.images_per_second == pytest.approx(2 / 1e-4, rel=0.02)


def test_a_slow_link_is_the_limit() -> None:
    """One host serves, the other trains: while a push travels, the next one grows to its largest size."""
    layout = ["layout.data=1", "layout.servers=1", 'layout.place={server=["host0"], data=["host1"], worker=["host1"]}']
    settings = config.load(None, [*layout, "push.protocol=delta", "push.images=32", "worker.threads=1"])
    machines = cluster(2, 2, 4, image=1e-6)
    machines.links.bandwidth = 1e6
    predicted = predict_job(machines, settings, batches=4000)
    size = parameters.total(model(settings, describe(settings.data)))
    assert predicted.link_busy == pytest.approx(1.0, abs=0.05)
    assert predicted.images_per_second == pytest.approx(2 * 32 * 1e6 / (4 * size), rel=0.05)


def test_an_idle_link_sends_a_burst_at_once() -> None:
    """A megabyte three times, and once more after a second: at a megabyte per second, with a burst of two."""
    machines = cluster(2, 1, 1)
    machines.links.bandwidth = 1e6
    machines.links.burst = 2e6
    time = simpy.Environment()
    one, other = (Host(time, machines) for _ in range(2))
    arrived = []

    def send():
        for pause in (0, 0, 0, 1):
            yield time.timeout(pause)
            yield from one.send(other, 1_000_000)
            arrived.append(time.now)

    time.process(send())
    time.run()
    assert arrived == pytest.approx([0, 0, 1, 2])


def test_one_thread_of_a_rank_runs_python_at_a_time() -> None:
    """Four threads on four cores, each with as much Python as kernels; then each in a rank of its own."""
    alone, together = (
        predict_job(
            cluster(1, 2 + ranks, 8, image=1e-4, task=32e-4),
            config.load(None, ["layout.data=1", "layout.servers=1", f"worker.threads={4 // ranks}", "train.batch=32"]),
        ).images_per_second
        for ranks in (4, 1)
    )
    assert alone == pytest.approx(4 / 2e-4, rel=0.02)
    assert together == pytest.approx(1 / 1e-4, rel=0.02)


def test_a_share_is_what_a_replica_pushes_in_a_step() -> None:
    """Factors of a synchronous push are those of the images that the replica has computed."""
    settings = config.load(None, ["consistency.staleness=0", "push.protocol=factor", "train.batch=64"])
    description = describe(settings.data)
    shapes = model(settings, description)
    sizes = []
    for ranks in (3, 4):
        layout = arrange(["host"] * ranks, settings.layout)
        loads = replica_load(settings, layout, shapes, description, cluster(1, ranks, 2).costs)
        sizes.append(sum(part.bytes for part in loads.push.values()))
    assert sizes[1] < 0.7 * sizes[0]


def test_events_at_the_same_time_are_found_in_one_round() -> None:
    """Three things to do at once, and one later: two rounds of the loop."""
    machines = cluster(1, 1, 1, turn=0.5)
    time = simpy.Environment()
    rank = Rank(Host(time, machines), machines.costs, rank_generator(1, 0), True)
    ended = []

    def work(after):
        yield time.timeout(after)
        yield from rank.do(1.0)
        ended.append(time.now)

    for after in (0.1, 0.1, 0.2, 9.0):
        time.process(work(after))
    time.run()
    assert ended == pytest.approx([1.6, 2.6, 3.6, 10.5])


def test_bytes_between_hosts_are_work_for_both_sides() -> None:
    """As fast as a server's main thread receives pushes and a worker's sends them, whatever the link could do."""
    layout = ["layout.data=1", "layout.servers=1", 'layout.place={server=["host0"], data=["host1"], worker=["host1"]}']
    words = [*layout, "push.protocol=delta", "push.images=32", "pull.images=1000000", "worker.threads=1"]
    settings = config.load(None, words)
    machines = cluster(2, 2, 4, image=1e-6, wire=1e-8)
    predicted = predict_job(machines, settings)
    assert predicted.link_busy * machines.links.bandwidth == pytest.approx(1 / 1e-8, rel=0.05)
    assert predicted.server_busy > 0.9


def ranks(hosts: int, cores: int, patient: bool, **costs: float) -> tuple[simpy.Environment, list[Rank]]:
    """Return the clock and two ranks, on one host or two."""
    machines = cluster(hosts, 2 // hosts, cores, **costs)
    machines.links.bandwidth = 1e6
    time = simpy.Environment()
    places = [Host(time, machines) for _ in range(hosts)]
    return time, [
        Rank(places[number % hosts], machines.costs, rank_generator(1, number), patient) for number in range(2)
    ]


def test_a_main_thread_yields_its_core_whenever_it_calls_mpi() -> None:
    """On a core where another thread computes, each look waits for one of its slices: a round, for all of them."""
    assert LOOKS > SLICES
    for busy in (0.0, 1.0):
        time, (rank, _) = ranks(1, 1, True, turn=1e-4)
        ended = []

        def notice(rank=rank, time=time, ended=ended):
            yield from rank.notice()
            ended.append(time.now)

        time.process(rank.host.work(busy))
        time.process(notice())
        time.run()
        assert ended == pytest.approx([busy + 1e-4])


def test_a_sleep_is_a_part_of_the_wait_and_a_polling_rank_sleeps_later() -> None:
    for patient, most in ((True, 4e-3), (False, 1.0)):
        time, (rank, _) = ranks(1, 1, patient, nap=4e-3, spin=2.0, poll=1.0)
        noticed = []

        def notice(rank=rank, time=time, noticed=noticed):
            for _ in range(200):
                began = time.now
                yield from rank.notice()
                noticed.append(time.now - began)
                rank.rested = time.now
                yield time.timeout(1e-3 if rank.nap else 10.0)

        time.process(notice())
        time.run()
        assert 0.9 * most < max(noticed) <= most


def test_a_large_message_to_another_host_is_announced_and_answered() -> None:
    """Both sides sleep for up to 10 ms: one below the limit is on its way at once, one above it is not."""
    taken = {}
    for size in (EAGER, EAGER + 1):
        time, (one, other) = ranks(2, 1, True, nap=1e-2, poll=1e-2)
        one.rested = other.rested = -1.0
        time.process(one.send(other, size))
        time.run()
        taken[size] = time.now - size / 1e6
    assert taken[EAGER] == pytest.approx(0.0, abs=1e-9)
    assert 1e-4 < taken[EAGER + 1] < 2e-2


def test_a_main_thread_progresses_all_transfers_at_once(monkeypatch) -> None:
    """Ten transfers of 0.06 s share a link; a rank that sleeps as long as it polls is awake half of the 0.6 s."""
    work = Host.work
    worked = Counter()

    def counted(self: Host, seconds: float, woken: bool = False) -> Steps:
        worked[self] += seconds
        yield from work(self, seconds, woken)

    monkeypatch.setattr(Host, "work", counted)
    time, (one, other) = ranks(2, 1, patient=True, turn=1e-4, nap=1e-4, poll=1e-4)
    for _ in range(10):
        time.process(one.send(other, 60_000))
    time.run()
    assert worked[one.host] == worked[other.host] == pytest.approx(0.3, rel=0.01)


def test_an_acknowledgement_waits_for_the_copies() -> None:
    """Three servers with a copy of everything each: what is pushed is applied three times, by way of slow links."""
    layout = ["layout.data=1", "layout.servers=3", "push.protocol=delta", "worker.threads=1"]
    one, three = (
        predict_job(cluster(1, 5, 8, image=1e-6, apply=1e-8), config.load(None, [*layout, f"server.copies={copies}"]))
        for copies in (1, 3)
    )
    assert three.images_per_second == pytest.approx(one.images_per_second / 3, rel=0.2)


def test_with_clocks_a_server_handles_a_message_twice() -> None:
    """One after the other: a worker sends, a server takes in and applies, a worker asks for weights and has them."""
    settings = config.load(None, ["layout.data=1", "layout.servers=1", "consistency.staleness=0", "worker.threads=1"])
    description = describe(settings.data)
    shapes = model(settings, description)
    machines = cluster(1, 3, 8, message=1e-3)
    loads = replica_load(settings, arrange(["host"] * 3, settings.layout), shapes, description, machines.costs)
    messages = sum(part.messages for part in loads.push.values())
    wanted = settings.train.batch / ((3 * messages + 2) * 1e-3)
    assert predict_job(machines, settings).images_per_second == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("staleness", ["0", "2"])
def test_a_bound_is_kept_and_waited_for(staleness: str) -> None:
    settings = config.load(None, ["layout.data=1", "layout.servers=1", f"consistency.staleness={staleness}"])
    machines = cluster(1, 5, 8, image=1e-4)
    machines.variation.slow = 0.34
    machines.variation.factor = 5.0
    predicted = predict_job(machines, settings)
    assert predicted.staleness_most <= int(staleness)
    assert predicted.waiting > 0.3


def test_pulls_do_not_read_from_servers_that_hold_copies_only() -> None:
    """Eight hosts with two ranks each have more servers than the default model has shards for."""
    settings = config.load(None, [])
    layout = arrange([f"host{number // 2}" for number in range(16)], settings.layout)
    machines = cluster(8, 2, 2, image=1e-4)
    loads = replica_load(
        settings, layout, model(settings, describe(settings.data)), describe(settings.data), machines.costs
    )
    assert set(loads.pull) == set(loads.push) < set(layout.servers)
    assert predict_job(machines, settings, batches=20).images_per_second > 0


def test_a_clock_with_fewer_images_than_threads_is_counted_image_by_image() -> None:
    """Three replicas of four threads share four images: two of them have one image, the third has two."""
    words = ["layout.data=1", "layout.servers=1", "consistency.staleness=0", "train.batch=4", "worker.threads=4"]
    settings = config.load(None, [*words, "push.protocol=delta"])
    predicted = predict_job(cluster(1, 5, 16, image=1e-3), settings, batches=20)
    assert predicted.replicas == 3
    assert predicted.images_per_second == pytest.approx(4 / 1e-3, rel=0.02)


def test_the_time_left_is_unknown_at_the_start(capsys, monkeypatch) -> None:
    monkeypatch.setattr(prediction, "INTERVAL", 0.0)
    prediction.Progress()(0.001)
    assert capsys.readouterr().err == "simulated 0%, ETA unknown\n"


def test_a_straggler_slows_no_other_replica_without_a_bound() -> None:
    settings = config.load(None, ["layout.data=1", "layout.servers=1", "worker.threads=1"])
    machines = cluster(1, 5, 8, image=1e-4)
    machines.variation.slow = 0.34
    machines.variation.factor = 5.0
    predicted = predict_job(machines, settings)
    assert predicted.images_per_second == pytest.approx(2.2 / 1e-4, rel=0.05)
    assert predicted.waiting == 0


def test_equal_seeds_give_equal_figures() -> None:
    settings = config.load()
    machines = [cluster(2, 4, 2, image=1e-4, message=5e-5, batch=1e-4, poll=1e-3) for _ in range(2)]
    for made in machines:
        made.variation.spread = 0.2
    assert predict_job(machines[0], settings, batches=100) == predict_job(machines[1], settings, batches=100)


def test_the_command_prints_figures_and_on_stderr_how_far_it_is(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(prediction, "INTERVAL", 0.0)
    file = tmp_path / "cluster.toml"
    file.write_text(
        "[hosts]\ncount = 2\n[costs]\n"
        + "".join(f"{name} = 1e-7\n" for name in ("image", "prepare", "copy", "sign", "wire", "apply", "pull"))
    )
    assert cli.main(["simulate", str(file), "--set", "layout.servers=1"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["images_per_second"] > 0
    shares = [int(line.split()[1].removesuffix("%,")) for line in streams.err.splitlines()]
    assert shares == sorted(shares) and shares[0] < 5 and shares[-1] > 95


def test_a_wrong_key_is_named(tmp_path, capsys) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[hosts]\nnumber = 2\n")
    assert cli.main(["simulate", str(file)]) == 2
    assert "unknown key hosts.number" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch) -> None:
    assert cli.main(["simulate", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.endswith("none.toml: No such file or directory; give a TOML file\n")
    for name in [name for name in sys.modules if name.startswith("adam_mpi.simulate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert cli.main(["simulate", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == ("adam_mpi: simulate needs simpy; install it: pip install 'adam-mpi[simulate]'\n")
