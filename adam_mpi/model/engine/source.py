"""A text buffer for emitted Python: lines at the current depth."""

from collections.abc import Iterator
from contextlib import contextmanager


class Source:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """The lines written meanwhile are the body of `head`."""
        self(head)
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def kernel(self, head: str, nest: str) -> Iterator[None]:
        """A compiled function; `nest` says in words what its loops do."""
        self("")
        self("")
        self("@kernel")
        with self.inside(f"def {head}:"):
            self(f'"""{nest}"""')
            yield

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
