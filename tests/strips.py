"""The strips of a replica in one process: their contexts run segment by segment, and exchange in memory."""

import numpy as np


def exchange(sides, direction):
    """Run one exchange, of which `sides` are the buffers of all strips."""
    sent = [{to: np.empty(shape) for to, shape in side.shapes_out(direction).items()} for side in sides]
    for side, out in zip(sides, sent, strict=True):
        side.pack(direction, out)
    for strip, side in enumerate(sides):
        arrived = {source: sent[source][strip] for source in side.shapes_in(direction)}
        assert {source: values.shape for source, values in arrived.items()} == side.shapes_in(direction)
        side.unpack(direction, arrived)


def run(contexts, started):
    """Run all segments; return the result of each strip."""
    for segments in zip(*started, strict=True):
        for segment in segments:
            for work in segment.work + segment.meanwhile:
                work()
        assert len({segment.port for segment in segments}) == 1
        if (port := segments[0].port) is not None:
            exchange([context.passages[port.passage] for context in contexts], port.direction)
    return [context.result for context in contexts]


def scatter(cut, flat):
    """Return each strip's part of a flat parameter vector."""
    return [np.concatenate([flat[p.start : p.start + p.size] for p in strip.pieces]) for strip in cut.strips]


def gather(cut, parts):
    """Return the flat vector of gradients: what several strips hold is summed."""
    flat = np.zeros(max(piece.start + piece.size for piece in cut.strips[-1].pieces), parts[0].dtype)
    for strip, part in zip(cut.strips, parts, strict=True):
        for piece in strip.pieces:
            flat[piece.start : piece.start + piece.size] += part[piece.local : piece.local + piece.size]
    return flat


def columns(cut, pixels):
    """Return each strip's columns of `pixels`."""
    return [pixels[..., strip.columns[0] : strip.columns[1]] for strip in cut.strips]
