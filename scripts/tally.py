"""Counts the outcomes of one part of scripts/test: `tally.py DIR` prints the numbers passed, failed and skipped.

DIR has a file rank-R.results per rank, written by tests/conftest.py test by test, so it is there even
when the process was killed: "begin TEST", then "passed TEST", "failed TEST" or "skipped TEST".
"""

import sys
from pathlib import Path

BETTER_FIRST = ["passed", "skipped", "begin", "failed"]


def outcomes(file: Path) -> dict[str, str]:
    """The last word about each test on one rank."""
    pairs = (line.split(" ", 1) for line in file.read_text().splitlines())
    return {test: word for word, test in pairs}


def tally(folder: Path) -> tuple[int, int, int]:
    """A test counts once, with the worst that any rank says; one that did not end has failed, if nothing else has."""
    worst: dict[str, str] = {}
    unended: list[str] = []
    for file in sorted(folder.glob("rank-*.results")):
        for test, word in outcomes(file).items():
            worst[test] = max(worst.get(test, word), word, key=BETTER_FIRST.index)
            if word == "begin":
                unended.append(f"{file.stem} did not end {test}")
    words = list(worst.values())
    # A failure ends the job, and with it what the other ranks were at.
    failed = words.count("failed")
    if not failed and unended:
        print(*unended, sep="\n", file=sys.stderr)
        failed = words.count("begin")
    return words.count("passed"), failed, words.count("skipped")


if __name__ == "__main__":
    print(*tally(Path(sys.argv[1])))
