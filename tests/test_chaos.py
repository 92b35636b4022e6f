"""A short, seeded part of scripts/chaos: random kills while training, and kills at named points under the oracle."""

import chaos
import pytest
from launch import available

pytestmark = [
    pytest.mark.timeout(430),
    pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="needs an Open MPI that survives"),
    pytest.mark.parametrize("mpi", ["openmpi"], indirect=True),
]
full = pytest.mark.full


@pytest.mark.parametrize(
    ("point", "seed"),
    [
        ("rebuild", 3),
        pytest.param("recover", 1, marks=full),
        pytest.param("prepare", 1, marks=full),
        pytest.param("applied", 2, marks=full),
        pytest.param("rename", 3, marks=full),
    ],
)
def test_what_is_acknowledged_is_in_the_weights(point, seed, mpi, tmp_path):
    run = chaos.point(point, seed)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path))
    assert figures["recoveries"] >= 1


def test_servers_on_other_hosts_may_die(hosts, mpi, tmp_path):
    """Two of them; whoever reads or writes there at that moment goes on."""
    run = chaos.point("rebuild", 3, hosts=3)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path / "job", hosts.environment))
    assert figures["recoveries"] >= 1


@full
@pytest.mark.parametrize(("kind", "seed"), [("async", 4), ("async factor", 2), ("async strips", 4)])
def test_training_reaches_its_accuracy_whoever_dies(kind, seed, mpi, tmp_path):
    run = chaos.draw(seed, kind)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path))
    assert figures["recoveries"] >= 1


@full
def test_a_synchronous_run_ends_with_the_weights_of_an_undisturbed_one(mpi, tmp_path):
    run = chaos.draw(5, "sync")
    disturbed, killed = chaos.play(run, mpi, tmp_path / "disturbed")
    chaos.check(run, disturbed, killed)
    assert chaos.distance(disturbed, chaos.undisturbed(run, mpi, tmp_path / "undisturbed")) < 1e-4
