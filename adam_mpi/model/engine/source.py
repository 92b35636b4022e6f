"""A text buffer for emitted Python: lines at the current depth."""

from collections.abc import Iterator
from contextlib import contextmanager

# What the first factor of `multiply_adds` is: the same number in all lanes, or a vector.
BROADCAST, LOAD = repr("broadcast"), repr("load")


class Source:
    def __init__(self) -> None:
        self.head: list[str] = []
        self.lines: list[str] = []
        self.depth = 0
        self.made: dict[str, str] = {}

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

    def make(self, function: str, *arguments: object) -> str:
        """The name of a function that `function(arguments)` makes; it is made once, before all kernels."""
        call = f"{function}({', '.join(map(str, arguments))})"
        return self.made.setdefault(call, f"{function}_{len(self.made) + 1}")

    @property
    def text(self) -> str:
        made = [f"{name} = {call}" for call, name in self.made.items()]
        return "\n".join(self.head + made + self.lines) + "\n"
