"""The phases of a job: train, validate, repeat or stop, test once."""

from adam_mpi.config import Train
from adam_mpi.sharding.training_state import PhaseSchedule


def walk(train, validates=True, accuracies=(), **resumed):
    """Return part and epoch of every phase, with `accuracies` of validation in turn, and why training stopped."""
    schedule = PhaseSchedule(train, validates, **resumed)
    given = iter(accuracies)
    seen = []
    while (phase := schedule.phase) is not None:
        assert phase.number == len(seen)
        seen.append(f"{phase.part} {phase.epoch}")
        schedule.advance(next(given, 0.5) if phase.part == "validation" else 0.99)
    return seen, schedule.reason


def test_each_epoch_is_validated_and_the_end_is_tested_once():
    phases = ["train 1", "validation 1", "train 2", "validation 2", "test 2"]
    assert walk(Train(epochs=2)) == (phases, "epochs")


def test_without_a_validation_part():
    assert walk(Train(epochs=2), validates=False) == (["train 1", "train 2", "test 2"], "epochs")


def test_without_epochs_it_only_tests():
    assert walk(Train(epochs=0)) == (["test 0"], "epochs")


def test_a_test_part_that_is_not_to_be_used_is_not():
    assert walk(Train(epochs=1, test=False)) == (["train 1", "validation 1"], "epochs")
    assert walk(Train(epochs=1, test=False), validates=False) == (["train 1"], "epochs")
    assert walk(Train(epochs=9, test=False, target=0.4)) == (["train 1", "validation 1"], "target")
    assert walk(Train(epochs=2, test=False), epochs_done=2)[0] == ["validation 2"]
    assert walk(Train(epochs=2, test=False), validates=False, epochs_done=2)[0] == []


def test_a_target_stops():
    phases, reason = walk(Train(epochs=9, target=0.9), accuracies=(0.8, 0.9, 0.95))
    assert (phases[-2:], reason) == (["validation 2", "test 2"], "target")


def test_patience_counts_from_the_best_epoch():
    phases, reason = walk(Train(epochs=9, patience=2), accuracies=(0.8, 0.7, 0.85, 0.85, 0.84, 0.99))
    assert (phases[-1], reason) == ("test 5", "patience")


def test_without_patience_and_target_nothing_stops_early():
    assert walk(Train(epochs=5), accuracies=(0.9, 0.1, 0.1, 0.1, 1.0))[0][-1] == "test 5"


def test_a_resumed_job_continues_after_the_epochs_done():
    assert walk(Train(epochs=3), epochs_done=2)[0] == ["validation 2", "train 3", "validation 3", "test 3"]
    assert walk(Train(epochs=3), epochs_done=3)[0] == ["validation 3", "test 3"]
    assert walk(Train(epochs=3), epochs_done=5)[0] == ["validation 5", "test 5"]
    assert walk(Train(epochs=3), validates=False, epochs_done=2)[0] == ["train 3", "test 3"]
    assert walk(Train(epochs=3), epochs_done=2, midway=True)[0] == ["train 3", "validation 3", "test 3"]


def test_a_resumed_job_knows_the_best_epoch_so_far():
    phases, reason = walk(Train(epochs=9, patience=2), accuracies=(0.7, 0.7, 0.9), epochs_done=4, best=(0.8, 3))
    assert (phases[-1], reason) == ("test 5", "patience")
