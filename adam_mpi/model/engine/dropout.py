"""Dropout: the same masks as the reference kernel's, a function of seed, epoch, image, layer and unit alone."""

from adam_mpi.model.engine.source import Source


def emit(
    source: Source, name: str, units: int, within: tuple[int, int, int], layer: int, rate: float, lanes: int
) -> None:
    """One block; `first` is the number of its first image. The same call serves values and errors.

    `within`: of `whole` columns these are `width` ones from `start` on; a unit's number is that in the whole layer.
    """
    start, width, whole = within
    limit, scale = int(rate * 2**32), 1 / (1 - rate)
    head = f"{name}(memory, keys, inputs, outputs, first, training)"
    with source.kernel(head, f"Zero a share {rate} of {units} units, scale up the others."):
        source(f"limit = np.uint64({limit} if training else 0)")
        source(f"scale = np.float32({scale!r} if training else 1.0)")
        number = "unit" if width == whole else f"unit // {width} * {whole} + {start} + unit % {width}"
        with source.inside(f"for unit in range({units}):"):
            source(f"counter = (np.uint64({layer}) << np.uint64(40) ^ np.uint64({number})) * SPREAD")
            with source.inside(f"for lane in range({lanes}):"):
                source("draw = mix(keys[first + lane] + counter) >> np.uint64(32)")
                source(f"value = memory[inputs + unit * {lanes} + lane]")
                source("kept = np.float32(0) if draw < limit else value * scale")
                source(f"memory[outputs + unit * {lanes} + lane] = kept")
