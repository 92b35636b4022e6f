"""Collect the lines of emitted Python source, at the current depth of indentation."""

from collections.abc import Iterator
from contextlib import contextmanager

BROADCAST = repr("broadcast")
"""First factor of `multiply_adds`: the same number in all lanes."""
LOAD = repr("load")
"""First factor of `multiply_adds`: a vector."""


class Source:
    """Emitted source: `head` comes first, then the functions that are made, then the lines."""

    def __init__(self) -> None:
        self.head: list[str] = []
        self.lines: list[str] = []
        self.depth = 0
        self.made: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """Make the lines written meanwhile the body of `head`."""
        self(head)
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def kernel(self, head: str, nest: str) -> Iterator[None]:
        """Make the lines written meanwhile the body of a compiled function; `nest` says what its loops do."""
        self("")
        self("")
        self("@kernel")
        with self.inside(f"def {head}:"):
            self(f'"""{nest}"""')
            yield

    def make(self, function: str, *arguments: object) -> str:
        """Return the name of a function that `function(arguments)` makes; it is made once, before all kernels."""
        call = f"{function}({', '.join(map(str, arguments))})"
        return self.made.setdefault(call, f"{function}_{len(self.made) + 1}")

    @property
    def text(self) -> str:
        """All that was emitted."""
        made = [f"{name} = {call}" for call, name in self.made.items()]
        return "\n".join(self.head + made + self.lines) + "\n"
