"""The memory layout: places that do not overlap, reads that cover what is wanted, mailboxes within their memory."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi import cli
from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.memory_layout import MOST_BATCHES, MOST_SLOTS, WIDTHS, plan_layout
from adam_mpi.sharding.message_formats import message_words
from adam_mpi.sharding.rings import LINE


def config(shard=1000, mailbox=256 << 20, codec="none", ema=0.0, short=False):
    made = Config()
    made.server.shard = shard
    made.server.mailbox_bytes = mailbox
    made.push.codec = codec
    made.optimizer.ema = ema
    made.pull.codec = "bfloat16" if short else "none"
    return made


def layers(sizes):
    """Return a tensor of each size, one after the other."""
    tensors = []
    offset = 0
    for number, size in enumerate(sizes):
        tensors.append(Tensor(f"dense{number}/weight", f"dense{number}", (size,), offset, size))
        offset += size
    return tensors


def planned(sizes, servers, pushers, made):
    return plan_layout(
        layers(sizes), {rank: "host" for rank in range(servers)}, range(servers, servers + pushers), made
    )


SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 5), st.integers(1, 9), st.sampled_from([0.0, 0.1]), st.booleans())
def test_nothing_published_overlaps(sizes, servers, pushers, ema, short):
    memory_layout = planned(sizes, servers, pushers, config(ema=ema, short=short))
    for server in memory_layout.servers:
        places = [(0, LINE)] + [(memory_layout.line_offset(ring), LINE) for ring in range(pushers)]
        places.append((memory_layout.version_offset, 8 * len(memory_layout.served[server])))
        for region in memory_layout.regions:
            offset = memory_layout.region_offset(server, region)
            assert offset % LINE == 0
            places.append((offset, WIDTHS[region] * memory_layout.size(server)))
        assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
        assert sum(places[-1]) == memory_layout.published_bytes(server)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 4), st.booleans(), st.data())
def test_runs_read_the_wanted_shards_and_nothing_else(sizes, servers, short, data):
    memory_layout = planned(sizes, servers, 2, config(shard=300, short=short))
    every = frozenset(shard.index for shard in memory_layout.shards)
    wanted = data.draw(st.none() | st.frozensets(st.sampled_from(sorted(every))))
    region = memory_layout.regions[-1]
    covered = []
    for server in memory_layout.servers:
        offset, places = memory_layout.region_offset(server, region), {}
        for shard in memory_layout.served[server]:
            for parameter in range(shard.start, shard.stop):
                places[parameter] = offset
                offset += WIDTHS[region]
        for start, size, first in memory_layout.runs(server, region, wanted):
            covered += range(start, start + size)
            assert [places[start + i] for i in range(size)] == [first + i * WIDTHS[region] for i in range(size)]
    chosen = [shard for shard in memory_layout.shards if wanted is None or shard.index in wanted]
    assert sorted(covered) == [parameter for shard in chosen for parameter in range(shard.start, shard.stop)]


def test_neighbors_on_one_server_are_one_read():
    memory_layout = planned([10_000], 1, 1, config())
    assert len(memory_layout.shards) == 10
    assert memory_layout.runs(0, "weights") == [(0, 10_000, memory_layout.region_offset(0, "weights"))]
    assert len(memory_layout.runs(0, "weights", frozenset([0, 1, 5]))) == 2


@settings(max_examples=50)
@given(SIZES, st.integers(1, 3), st.integers(1, 1000), st.sampled_from(sorted(CODECS)), st.integers(20, 30))
def test_mailboxes_stay_within_their_memory(sizes, servers, pushers, codec, power):
    made = config(shard=262_144, mailbox=1 << power, codec=codec)
    try:
        memory_layout = planned(sizes, servers, pushers, made)
    except UserError:
        # There is no room for two of the smallest slots per pusher.
        assert 2 * pushers * 4 * message_words(CODECS[codec].words(64), MOST_BATCHES) > (1 << power) - 2 * pushers * 64
        return
    assert memory_layout.mailbox_bytes == pushers * memory_layout.slots * memory_layout.slot_bytes <= 1 << power
    assert 2 <= memory_layout.slots <= MOST_SLOTS * (2 if memory_layout.peers.count else 1)
    for shard in memory_layout.shards:
        assert 4 * message_words(CODECS[codec].words(shard.size), MOST_BATCHES) <= memory_layout.slot_bytes


def test_a_thousand_pushers_get_smaller_shards():
    memory_layout = planned([10_000_000], 50, 1000, config(shard=262_144))
    assert memory_layout.mailbox_bytes <= 256 << 20 and memory_layout.slots >= 2
    assert max(shard.size for shard in memory_layout.shards) >= 16_384


def test_a_mailbox_too_small_names_its_key():
    with pytest.raises(UserError, match=r"server\.mailbox_bytes = 65536: too small for 500 pushers; at least \d+"):
        planned([10_000], 1, 500, config(mailbox=1 << 16))
    least = int(str(pytest.raises(UserError, planned, [10_000], 1, 500, config(mailbox=1 << 16)).value).split()[-1])
    assert planned([10_000], 1, 500, config(mailbox=least)).slots == 2


def test_plan_prints_the_bytes_of_mailboxes_for_a_thousand_ranks(capsys):
    assert cli.main(["plan", "-n", "1000"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "for mailboxes" in line)
    assert "MB for mailboxes (" in line and "pushers x 3 slots of" in line
    assert float(line.split(",")[1].split()[0]) <= 256
