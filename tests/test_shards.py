"""Shards, buckets and their placement, without MPI."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding.shards import MOST_BUCKETS, Shard, buckets, cut, place

SHAPES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 300)), min_size=1, max_size=6)


def layers(shapes):
    """Return a weight (rows x columns) and a bias (rows) per layer, one after the other in the flat vector."""
    tensors, offset = [], 0
    for number, (rows, columns) in enumerate(shapes):
        for name, shape, size in (("weight", (rows, columns), rows * columns), ("bias", (rows,), rows)):
            tensors.append(Tensor(f"dense{number}/{name}", f"dense{number}", shape, offset, size))
            offset += size
    return tensors


def equal_shards(count, size=1000):
    return tuple(Shard(index, f"dense{index % 7}", index * size, size) for index in range(count))


def hosts(count, per_host=1):
    return {rank: f"host{rank // per_host}" for rank in range(count)}


def loads(pieces, holders):
    """Return how many parameters each server is the primary of."""
    counts = Counter()
    for shard, held in zip(pieces, holders, strict=True):
        counts[held[0]] += shard.size
    return counts


@given(SHAPES, st.integers(64, 5000))
def test_every_parameter_is_in_one_shard_of_its_layer(shapes, size):
    tensors = layers(shapes)
    pieces = cut(tensors, size)
    assert [shard.index for shard in pieces] == list(range(len(pieces)))
    assert pieces[0].start == 0 and pieces[-1].stop == tensors[-1].offset + tensors[-1].size
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    spans = {t.layer: (t.offset, t.offset + t.size) for t in tensors if t.name.endswith("weight")}
    for shard in pieces:
        first, last = spans[shard.layer]
        rows = next(t.shape[0] for t in tensors if t.layer == shard.layer)
        assert 0 < shard.size <= size and first <= shard.start and shard.stop <= last + rows


@given(SHAPES, st.integers(64, 5000))
def test_shards_are_cut_between_rows_where_a_row_fits(shapes, size):
    tensors = layers(shapes)
    weights = {t.layer: t for t in tensors if t.name.endswith("weight")}
    for shard in cut(tensors, size):
        weight = weights[shard.layer]
        row = weight.size // weight.shape[0]
        if row <= size and shard.start < weight.offset + weight.size:
            assert (shard.start - weight.offset) % row == 0


def test_each_shard_is_a_bucket_until_there_are_too_many():
    few, many = equal_shards(MOST_BUCKETS), equal_shards(3 * MOST_BUCKETS)
    assert [[shard] for shard in few] == buckets(few)
    grouped = buckets(many)
    assert 0.9 * MOST_BUCKETS < len(grouped) <= MOST_BUCKETS
    assert sorted(shard.index for group in grouped for shard in group) == list(range(len(many)))
    assert all(group for group in grouped)


def test_shards_of_a_bucket_lie_together():
    many = equal_shards(MOST_BUCKETS + 500)
    holders = place(many, hosts(5), copies=2)
    for group in buckets(many):
        assert len({holders[shard.index] for shard in group}) == 1


def test_placement_depends_on_nothing_but_its_arguments():
    pieces = equal_shards(100)
    first = place(pieces, hosts(7), 3)
    assert place(pieces, dict(reversed(hosts(7).items())), 3) == first
    # Another process, whose own hashes differ, finds the same servers.
    program = "import test_shards as t; print(t.place(t.equal_shards(100), t.hosts(7), 3))"
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "PYTHONHASHSEED": "1"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=paths)
    assert said.stdout.strip() == repr(first)


def test_sharding_is_pure():
    """Nothing in the package imports MPI, directly or through another module."""
    program = (
        "import importlib, pkgutil, sys, adam_mpi.sharding as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print('adam_mpi.sharding.memory_layout' in sys.modules, 'mpi4py' in sys.modules)"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=paths)
    assert said.stdout.split() == ["True", "False"]


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(25, 40), st.lists(st.integers(1, 1000), max_size=40))
def test_no_server_has_more_than_its_share(servers, per_server, small):
    pieces = equal_shards(servers * per_server)
    # Layers that fill no shard.
    for size in small:
        pieces += (Shard(len(pieces), f"conv{len(pieces)}", pieces[-1].stop, size),)
    counts = loads(pieces, place(pieces, hosts(servers)))
    mean = sum(shard.size for shard in pieces) / servers
    assert max(counts.values()) <= 1.15 * mean


@pytest.mark.parametrize("per_server", [25, 50])
@pytest.mark.parametrize("servers", [*range(2, 12), 16, 23, 32, 40])
def test_adding_or_removing_a_server_moves_little_more_than_its_share(servers, per_server):
    pieces = equal_shards((servers + 1) * per_server)
    total = sum(shard.size for shard in pieces)
    many = place(pieces, hosts(servers + 1))
    # The last server and one in the middle: ranks keep their names when another one is removed.
    for lost in (servers, servers // 2):
        left = {rank: host for rank, host in hosts(servers + 1).items() if rank != lost}
        few = place(pieces, left)
        moved = sum(shard.size for shard, a, b in zip(pieces, many, few, strict=True) if a[0] != b[0])
        assert moved <= 1.5 * total / (servers + 1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_copies_lie_on_different_hosts_whenever_there_are_that_many(servers, per_host, copies):
    names = hosts(servers, per_host)
    holders = place(equal_shards(60), names, copies)
    for held in holders:
        assert len(held) == len(set(held)) == min(copies, servers)
        assert len({names[server] for server in held}) == min(copies, len(set(names.values())))


def test_balance_holds_with_copies_too():
    pieces = equal_shards(400)
    holders = place(pieces, hosts(8, per_host=2), copies=3)
    assert max(loads(pieces, holders).values()) <= 1.15 * 400_000 / 8
    held = Counter(server for copies in holders for server in copies)
    assert max(held.values()) <= 1.15 * 3 * 400 / 8
