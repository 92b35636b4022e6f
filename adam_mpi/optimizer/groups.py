"""Groups of parameters by the names of their tensors: each has its own learning rate and decay, or is frozen. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from adam_mpi.base.errors import UserError
from adam_mpi.config import Group
from adam_mpi.model.parameters import Tensor

ALL = Group()
"""The group of tensors that no pattern matches."""
STATISTICS = Group("statistics")
"""The group of running statistics, which are averaged instead of stepped, whatever the patterns are."""


@dataclass(frozen=True)
class GroupSpan:
    """Parameters from `start` to `stop` of the flat vector that belong to one group."""

    start: int
    stop: int
    group: Group


def group_spans(tensors: Sequence[Tensor], groups: Sequence[Group]) -> list[GroupSpan]:
    """Return the spans of the flat vector by group, neighbors of one group joined.

    A tensor belongs to the first group whose pattern its name matches. Raises UserError for a pattern that no name
    matches.
    """
    for number, group in enumerate(groups):
        if not any(fnmatchcase(tensor.name, group.match) for tensor in tensors):
            known = ", ".join(tensor.name for tensor in tensors[:6])
            given = f'optimizer.groups[{number}].match = "{group.match}": matches no parameter'
            raise UserError(f"{given}; patterns are for names such as {known}")
    spans: list[GroupSpan] = []
    for tensor in tensors:
        group = next((group for group in groups if fnmatchcase(tensor.name, group.match)), ALL)
        group = STATISTICS if tensor.statistic else group
        start = tensor.offset
        if spans and spans[-1].group is group and spans[-1].stop == start:
            start = spans.pop().start
        spans.append(GroupSpan(start, tensor.offset + tensor.size, group))
    return spans


def frozen_edges(spans: Sequence[GroupSpan]) -> list[int]:
    """Return where frozen parameters begin and end: shards are cut there."""
    return sorted({edge for span in spans if span.group.frozen for edge in (span.start, span.stop)})


def parts_of(spans: Sequence[GroupSpan], start: int, stop: int) -> Iterator[tuple[slice, Group]]:
    """Yield the parts of a shard from `start` to `stop`, counted from its start, with the group of each."""
    for span in spans:
        low = max(start, span.start)
        high = min(stop, span.stop)
        if low < high:
            yield slice(low - start, high - start), span.group
