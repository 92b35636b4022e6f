"""The strips of a replica in one process: their contexts run segment by segment, and exchange in memory."""

import numpy as np


def exchange(passages, direction):
    """Run one exchange of all strips in `direction`."""
    sent = [{to: np.empty(shape) for to, shape in passage.shapes_out(direction).items()} for passage in passages]
    for passage, out in zip(passages, sent, strict=True):
        passage.pack(direction, out)
    for strip, passage in enumerate(passages):
        arrived = {source: sent[source][strip] for source in passage.shapes_in(direction)}
        assert {source: values.shape for source, values in arrived.items()} == passage.shapes_in(direction)
        passage.unpack(direction, arrived)


def run(contexts, started):
    """Run all segments of the `started` contexts; return the result of each strip."""
    for segments in zip(*started, strict=True):
        for segment in segments:
            for work in segment.work + segment.meanwhile:
                work()
        assert len({segment.port for segment in segments}) == 1
        if (port := segments[0].port) is not None:
            exchange([context.exchange_buffers[port.exchange] for context in contexts], port.direction)
    return [context.result for context in contexts]


def scatter(cut, flat):
    """Return the part of the `flat` parameter vector that each strip holds."""
    return [np.concatenate([flat[p.start : p.start + p.size] for p in strip.pieces]) for strip in cut.strips]


def gather(cut, parts):
    """Return the flat vector of gradients; what several strips hold is summed."""
    flat = np.zeros(max(piece.start + piece.size for piece in cut.strips[-1].pieces), parts[0].dtype)
    for strip, part in zip(cut.strips, parts, strict=True):
        for piece in strip.pieces:
            flat[piece.start : piece.start + piece.size] += part[piece.local : piece.local + piece.size]
    return flat


def columns(cut, pixels):
    """Return the columns of `pixels` that each strip computes."""
    return [pixels[..., strip.columns[0] : strip.columns[1]] for strip in cut.strips]
