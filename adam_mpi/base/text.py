"""Numbers as text for people: byte counts, durations, ranges of numbers."""

from collections.abc import Sequence


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def number_ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Ascending numbers for people, as in `0-3, 7, 9-12`; at most so many runs of them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(texts + ["..."] * (len(found) > most))
