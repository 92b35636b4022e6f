"""The oracle of conservation runs: every push adds exactly 1 to every parameter, so weights show what was applied."""

from pathlib import Path

import numpy as np
from test_consistency import TENSORS

from adam_mpi.checkpoint import model_file, store_file
from adam_mpi.config import load
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.transport.conservation import (
    count_pushes,
    count_withdrawn,
    read_copies,
    read_messages,
    unexplained_weights,
)

# Rounding of the means that `onebit` sends; other codecs carry whole steps.
ROUNDED = {"onebit": 1e-2}


def conserved(directory: Path, summary: dict) -> None:
    """Check the weights of every copy, at the end and in the store, against recorded acknowledgements.

    With a codec that has error feedback, residuals count too. Pushes that a dead pusher had under way may be in some
    shards and not in others.
    """
    config = load(directory / "config.toml")
    dead = {member for recovery in summary["recoveries"] for member in recovery["members"]}
    held = {"copies": _same_copies(directory, summary)}
    if (directory / "DONE").exists():
        held["weights"] = weights(directory / "weights.h5")
    if config.asynchronous and config.store.interval > 0:
        held["store"] = stored(directory)
    counts = count_pushes(directory)
    withdrawn = count_withdrawn(directory)
    lost = {m: pushed - known - withdrawn[m] for m, (pushed, known) in counts.items()}
    assert not any(count for member, count in lost.items() if member not in dead), f"not acknowledged: {lost}"
    for name, values in held.items():
        if CODECS[config.push.codec].feedback:
            _explained(name, directory, config.push.codec, values, dead)
        else:
            _whole(name, values, sum(known for _, known in counts.values()), sum(lost.values()))


def _whole(name: str, values: np.ndarray, acknowledged: int, under_way: int) -> None:
    """Check that every weight is a number of pushes: the acknowledged ones, and some that the dead had under way."""
    least, most = values.min(), values.max()
    known = f"{name}: weights of {least} to {most}, acknowledged {acknowledged}, {under_way} under way of the dead"
    assert acknowledged <= least and most <= acknowledged + under_way, known
    assert np.array_equal(values, np.round(values)), f"{name}: something else than whole pushes was added"


def _explained(name: str, directory: Path, codec: str, values: np.ndarray, dead: set[int]) -> None:
    """Check that weights and residuals are one for every push, and have each message of an acknowledged push."""
    for member, (_, known) in count_pushes(directory).items():
        messages = {len(same) for same in read_messages(directory, member).values()} or {0}
        right = min(messages) >= known if member in dead else messages == {known}
        assert right, f"rank {member}: {messages} messages for a shard, {known} pushes acknowledged"
    off = np.abs(unexplained_weights(directory, values, dead))
    limit = ROUNDED.get(codec, 1e-4)
    wrong = int((off > limit).sum())
    assert off.max() <= limit, f"{name}: {wrong} of {off.size} parameters are wrong, by up to {off.max():g} pushes"


def _same_copies(directory: Path, summary: dict) -> np.ndarray:
    """Return the flat vector of the copies of all shards; check that all copies of a shard are the same."""
    copies = read_copies(directory)
    for shard, same in copies.items():
        assert len(same) >= min(2, summary["ranks"]["server"]), f"shard {shard} has {len(same)} copies"
        assert all(np.array_equal(other, same[0]) for other in same[1:]), f"shard {shard}: its copies differ"
    flat = np.concatenate([copies[shard][0] for shard in sorted(copies)])
    assert flat.size == sum(tensor.size for tensor in TENSORS), f"copies of {flat.size} parameters"
    return flat


def weights(path: Path) -> np.ndarray:
    """Return the flat weights of a model file."""
    return model_file.read_model(path, TENSORS)


def stored(directory: Path) -> np.ndarray:
    """Return the flat weights of the newest store."""
    folder = max((directory / "store").glob("[0-9]*"))
    pieces = [piece for path in sorted(folder.glob("server-*.h5")) for piece in store_file.read_store(path).written]
    return np.concatenate([piece.values["weights"] for piece in sorted(pieces, key=lambda piece: piece.start)])
