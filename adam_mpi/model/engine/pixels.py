"""Pixels of one block into the first layer's input: one vector per pixel, zero in lanes without an image."""

from adam_mpi.model.engine.source import Source


def emit(source: Source, size: int, lanes: int) -> None:
    with source.kernel("load_pixels(pixels, levels, memory, inputs, first, count)", f"{size} pixels per image."):
        with source.inside(f"for lane in range({lanes}):"):
            with source.inside("if first + lane < count:"):
                source(f"start = (first + lane) * {size}")
                with source.inside(f"for pixel in range({size}):"):
                    source(f"memory[inputs + pixel * {lanes} + lane] = levels[pixels[start + pixel]]")
            with source.inside("else:"):
                with source.inside(f"for pixel in range({size}):"):
                    source(f"memory[inputs + pixel * {lanes} + lane] = 0")
