"""Numbers as text: byte counts, durations, ranges of numbers."""

from collections.abc import Sequence


def format_bytes(size: float) -> str:
    """Return `size` bytes in the unit that suits it, as in `1.5 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return `seconds` as `minutes:seconds` or `hours:minutes:seconds`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def format_ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Return ascending `numbers` as ranges, as in `0-3, 7, 9-12`; the ranges after the first `most` are left out."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(texts + ["..."] * (len(found) > most))
