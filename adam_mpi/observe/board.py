"""The board: the last word of every rank, and the figures of the whole job that follow from them."""

from collections import Counter
from typing import Any

from adam_mpi.data.course import Phase


class Board:
    def __init__(self) -> None:
        self.words: dict[tuple[str, int], dict[str, Any]] = {}
        """(role, rank) -> what it told last."""

    def hear(self, rank: int, word: dict[str, Any]) -> None:
        key = word["role"], rank
        # A last word stays the last one, even when a periodic one follows it.
        self.words[key] = {"final": self.words.get(key, {}).get("final", False)} | word

    def of(self, role: str) -> list[dict[str, Any]]:
        return [word for (of, _), word in sorted(self.words.items()) if of == role]

    def shares(self, phase: Phase) -> list[dict[str, Any]]:
        """What the data ranks have counted in a phase."""
        return [word for word in self.of("data") if word["phase"] == phase.number]

    def owed(self, phase: Phase, ranks: int) -> list[int]:
        """Images that each replica still owes of its share, when all data ranks have told; else nothing."""
        shares = self.shares(phase)
        if len(shares) < ranks:
            return []
        return [sum(owed) for owed in zip(*(share["owed"] for share in shares), strict=True)]

    def bad(self) -> int:
        """Images that could not be used; each data rank knows those that it came across."""
        return len({image for word in self.of("data") for image in word["bad"]})

    def finals(self, role: str) -> int:
        """How many ranks of a role have told their last word."""
        return sum(word["final"] for word in self.of(role))

    def figures(self, phase: Phase, seconds: float) -> dict[str, float]:
        shares = self.shares(phase)
        images = sum(share["finished"] for share in shares)
        return {
            "images": int(images),
            "images_skipped": sum(share["skipped"] for share in shares),
            "images_per_second": images / max(seconds, 1e-9),
            "loss": sum(share["loss"] for share in shares) / max(images, 1),
            "accuracy": sum(share["correct"] for share in shares) / max(images, 1),
            "staleness": mean(self.histogram("leads")),
            "clock_wait": self.clock_wait(),
        }

    def clock_wait(self) -> float:
        """Seconds in which replicas were held back by the clocks of others, all replicas together."""
        return round(sum(word["clock_wait"] for word in self.of("worker")), 3)

    def histogram(self, name: str) -> Counter[int]:
        total: Counter[int] = Counter()
        for word in self.of("server"):
            total.update({int(value): count for value, count in word[name].items()})
        return total

    def pushes(self) -> dict[str, int]:
        workers, servers = self.of("worker"), self.of("server")
        holding = [word["applied"] for word in servers if word["shards"]]
        return {
            "sent": sum(word["pushes"]["sent"] for word in workers),
            "acknowledged": sum(word["pushes"]["acknowledged"] for word in workers),
            # Every server that holds shards applies its part of every push.
            "applied": min(holding, default=0),
            "duplicates": sum(word["duplicates"] for word in servers),
            "refused": sum(word["refused"] for word in servers),
            "bytes": sum(word["pushes"]["bytes"] for word in workers),
        }

    def pulls(self) -> dict[str, int]:
        workers = self.of("worker")
        return {key: sum(word["pulls"][key] for word in workers) for key in ("count", "bytes")}

    def workers(self) -> dict[str, dict[str, float]]:
        """By rank: images trained on, and seconds in which its threads computed, waited for data, for a clock."""
        keys = ("images", "busy", "starved", "clock_wait")
        return {str(word["rank"]): {key: round(word[key], 3) for key in keys} for word in self.of("worker")}

    def cpu(self) -> dict[str, float]:
        """CPU seconds by rank."""
        told = {rank: word["cpu"] for (_, rank), word in self.words.items()}
        return {str(rank): round(told[rank], 3) for rank in sorted(told)}

    def distribution(self, name: str) -> dict[str, Any]:
        histogram = self.histogram(name)
        return {
            "max": max(histogram, default=0),
            "mean": round(mean(histogram), 4),
            "histogram": {str(value): histogram[value] for value in sorted(histogram)},
        }


def mean(histogram: Counter[int]) -> float:
    return sum(value * count for value, count in histogram.items()) / max(histogram.total(), 1)
