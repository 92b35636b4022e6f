"""The plan of a whole job, made without MPI: layout, partition, memory layout and push protocol. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import Config
from adam_mpi.data.sets import Description, describe
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition, partition
from adam_mpi.planning.plan import check_memory, largest_network, model, partitions, plan_memory_layout
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.push_protocol import Choice, captured_layers, choose, largest_push


@dataclass(frozen=True)
class JobPlan:
    """What the ranks of a job would agree on."""

    config: Config
    description: Description
    shapes: tuple[LayerShape, ...]
    layout: Layout
    partition: Partition
    memory_layout: MemoryLayout
    choices: Mapping[str, Choice]
    """Layer -> what it pushes."""
    captured: Sequence[str]
    """Layers that push factors."""
    network: Network
    """The network of the strip that needs the most memory."""


def plan_job(config: Config, ranks: int, hosts: str | None, images: str | None = None) -> JobPlan:
    """Return the plan of a job of `ranks` ranks; raise a UserError for one that cannot run.

    `hosts`: as in "4x16", four hosts with room for sixteen ranks each; `images`: what they are like where there is no
    data set, as in "3x256x256:21841".
    """
    if ranks < 1:
        raise UserError(f"-n {ranks}: at least one rank is needed")
    description = describe(config.data) if images is None else _parse_images(images)
    shapes = model(config, description)
    config.layout.partitions = partitions(config, shapes, ranks)
    layout = arrange(_parse_hosts(ranks, hosts), config.layout)
    check_memory(config, description, shapes, layout)
    cut = partition(shapes, layout.partitions, config.layout.scheme)
    memory_layout = plan_memory_layout(config, cut, layout)
    choices = choose(memory_layout, config, largest_push(config), len({place.host for place in layout.places}))
    captured = captured_layers(choices)
    return JobPlan(
        config=config,
        description=description,
        shapes=shapes,
        layout=layout,
        partition=cut,
        memory_layout=memory_layout,
        choices=choices,
        captured=captured,
        network=largest_network(config, description, cut, captured),
    )


def _parse_hosts(ranks: int, hosts: str | None) -> list[str]:
    """Return a host name per rank, from "4x16": four hosts with room for sixteen ranks each."""
    if hosts is None:
        return ["localhost"] * ranks
    count, _, room = hosts.partition("x")
    if not (count.isdigit() and room.isdigit() and int(count) * int(room) >= ranks):
        raise UserError(f"--hosts {hosts}: expected HOSTSxRANKS with room for {ranks} ranks, e.g. 4x16")
    return [f"host{rank // int(room)}" for rank in range(ranks)]


def _parse_images(images: str) -> Description:
    """Return a data set of which only the images' shape and the number of classes are known."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)", images)
    if found is None or 0 in (numbers := [int(text) for text in found.groups()]):
        raise UserError(f"--images {images}: expected CHANNELSxROWSxCOLUMNS:CLASSES, e.g. 3x256x256:1000")
    channels, rows, columns, classes = numbers
    return Description(name="images", shape=(channels, rows, columns), classes=classes, train=0, validation=0, test=0)
