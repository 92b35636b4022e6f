"""The board: the last word of every rank, and the figures of the whole job that follow from them."""

import math
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from adam_mpi.cluster.layout import Layout
from adam_mpi.cluster.messages import Statistics
from adam_mpi.monitor import status
from adam_mpi.sharding.phases import Phase


class JobStatistics:
    def __init__(self) -> None:
        self.words: dict[tuple[str, int], dict[str, Any]] = {}
        """(role, number for life of a rank) -> what it told last."""
        self.timed: dict[tuple[str, int], dict[str, Any]] = {}
        self.pulses: dict[tuple[str, int], dict[str, Any]] = {}
        """The same -> what it did between the last two words that it told in its turn."""
        self.earlier: dict[int, list[int]] = {}
        """Pusher -> its pushes sent and acknowledged, as an earlier head heard them."""
        self.earlier_carried: dict[str, float] = {}
        """The same -> what its codec carried."""

    def go_on(self, pushes: dict[str, list[int]], carried: dict[str, float]) -> None:
        """What an earlier head knew of the pushers; most of them will tell more."""
        self.earlier |= {int(pusher): told for pusher, told in pushes.items()}
        self.earlier_carried |= carried

    def carried(self) -> dict[str, float]:
        """Pusher -> what its codec carries, as it told last."""
        told = {str(word["rank"]): word["carried"] for word in self.of("worker") if word["carried"] is not None}
        return self.earlier_carried | told

    def residual(self, workers: Collection[int]) -> dict[str, dict[str, float]]:
        """What codecs have left out, by pusher: carried by those who push, and lost with those who do no more.

        Of a rank that was lost it is what it told last; of one that has another strip now, what it left behind.
        """
        told = {pusher: round(length, 6) for pusher, length in self.carried().items()}
        left = {str(word["rank"]): round(word["left_behind"], 6) for word in self.of("worker") if word["left_behind"]}
        gone = {pusher: length for pusher, length in told.items() if int(pusher) not in workers}
        return {"carried": {pusher: told[pusher] for pusher in told if pusher not in gone}, "lost": gone | left}

    def of_pushers(self) -> dict[str, list[int]]:
        """Pusher -> its pushes sent and acknowledged, as far as it has told."""
        told = {word["rank"]: [word["pushes"][key] for key in ("sent", "acknowledged")] for word in self.of("worker")}
        return {str(pusher): pair for pusher, pair in (self.earlier | told).items()}

    def update(self, rank: int, message: Statistics) -> None:
        word = dict(message.values)
        if message.at is not None:
            word["at"] = message.at
        if message.final:
            word["final"] = True
        key = word["role"], rank
        # A last word stays the last one, even when a periodic one follows it.
        final = self.words.get(key, {}).get("final", False)
        self.words[key] = {"final": final, "heard": time.monotonic()} | word
        if "at" in word:
            if key in self.timed:
                self.pulses[key] = status.pulse(self.timed[key], word)
            self.timed[key] = word

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

    def finals(self, role: str, members: Collection[int]) -> int:
        """How many of these ranks have told their last word in a role."""
        return sum(word["final"] for word in self.of(role) if word["rank"] in members)

    def figures(self, phase: Phase, seconds: float) -> dict[str, float]:
        shares = self.shares(phase)
        images, not_finite = (sum(share[key] for share in shares) for key in ("finished", "not_finite"))
        loss = sum(share["loss"] for share in shares) / max(images - not_finite, 1)
        return {
            "images": int(images),
            "images_not_finite": int(not_finite),
            "images_skipped": sum(share["skipped"] for share in shares),
            "images_per_second": images / max(seconds, 1e-9),
            "loss": math.nan if 0 < images == not_finite else loss,
            "accuracy": sum(share["correct"] for share in shares) / max(images, 1),
            "staleness": mean(self.histogram("leads")),
            "clock_wait": self.clock_wait(),
        }

    def gauges(self) -> dict[str, Any]:
        """What else `metrics.jsonl` says: of the whole job so far, and of the moment."""
        servers = self.of("server")
        return {
            "rate": max((word["rate"] for word in servers), default=0.0),
            "bytes": {
                "pushed": sum(word["pushes"]["bytes"] for word in self.of("worker")),
                "pulled": self.pulls()["bytes"],
                "served": sum(word["bytes"] for word in self.of("data")),
            },
            "staleness_histogram": {str(value): count for value, count in coarse(self.histogram("leads")).items()},
            "apply_batch": round(self._mean("server", "apply_batch"), 3),
            "store_lag": max((word["store"]["behind"] for word in servers if word["store"]), default=0.0),
            "busy": {role: round(self._mean(role, "busy"), 3) for role in ("data", "worker", "server")},
            "layers": {name: row for word in self.of("worker") for name, row in word["layers"].items()},
        }

    def ranks(self, layout: Layout) -> list[dict[str, Any]]:
        return status.ranks(layout, self.words, self.pulses, time.monotonic())

    def _mean(self, role: str, figure: str) -> float:
        seen = [pulse[figure] for (of, _), pulse in self.pulses.items() if of == role]
        return sum(seen) / max(len(seen), 1)

    def clock_wait(self) -> float:
        """Seconds in which replicas were held back by the clocks of others, all replicas together."""
        return round(sum(word["clock_wait"] for word in self.of("worker")), 3)

    def histogram(self, name: str) -> Counter[int]:
        total: Counter[int] = Counter()
        for word in self.of("server"):
            total.update({int(value): count for value, count in word[name].items()})
        return total

    def pushes(self, members: Collection[int], pushers: Collection[int] | None = None) -> dict[str, int]:
        """Of the whole job; `members` are the ranks that are left; `pushers`: see `short`."""
        workers, servers, told = self.of("worker"), self.of("server"), self.of_pushers()
        applied = self._applied(members)
        gone = [pusher for pusher in told if int(pusher) not in members]
        return {
            "sent": sum(sent for sent, _ in told.values()),
            "acknowledged": sum(acknowledged for _, acknowledged in told.values()),
            "applied": sum(applied.values()),
            # In the end: by strips, when somebody was lost.
            "given_up": sum(sent - known for pusher, (sent, known) in told.items() if pusher not in gone),
            # In the weights, and whoever pushed them was lost before he could say that he knew.
            "unacknowledged_of_dead": sum(max(0, applied.get(pusher, 0) - told[pusher][1]) for pusher in gone),
            "short": sum(self.short(members, pushers).values()),
            "duplicates": sum(word["duplicates"] for word in servers),
            "refused": sum(word["refused"] for word in servers),
            "bytes": sum(word["pushes"]["bytes"] for word in workers),
        }

    def short(self, members: Collection[int], pushers: Collection[int] | None = None) -> dict[str, int]:
        """Pusher -> how many pushes it counts as acknowledged that some shard lacks: nobody, if all is well.

        In the end, when everybody has told his last word. `pushers`: whose word counts; None: everybody's, who was lost
        too.
        """
        last = {str(word["rank"]): word["pushes"]["last"] for word in self.of("worker")}
        last = {pusher: known for pusher, (_, known) in self.of_pushers().items()} | last
        applied = self._applied(members)
        judged = [pusher for pusher in last if pushers is None or int(pusher) in pushers]
        missing = {pusher: last[pusher] - applied.get(pusher, 0) for pusher in judged}
        return {pusher: count for pusher, count in missing.items() if count > 0}

    def _applied(self, members: Collection[int]) -> dict[str, int]:
        """Pusher -> the last of its pushes that every shard has, of the strip that it had last."""
        words = [word for word in self.of("server") if word["rank"] in members]
        told = [{(pusher, strip): number for pusher, strip, number in word["tables"]} for word in words]
        strips = [word["strips"] for word in words]
        last: dict[str, int] = {}
        for pusher, strip in {key for table in told for key in table}:
            # A server that knows nothing of somebody who has pushed to its strip has nothing of his.
            has = [table.get((pusher, strip), 0) for table, own in zip(told, strips, strict=True) if strip in own]
            last[pusher] = max(last.get(pusher, 0), min(has))
        return last

    def pulls(self) -> dict[str, int]:
        workers = self.of("worker")
        return {key: sum(word["pulls"][key] for word in workers) for key in ("count", "bytes")}

    def workers(self) -> dict[str, dict[str, float]]:
        """By rank: images trained on, and seconds in which its threads computed, waited for data, for a clock, ..."""
        keys = ("images", "busy", "starved", "clock_wait")
        return {
            str(word["rank"]): {key: round(word[key], 3) for key in keys}
            | {"waits": {reason: round(seconds, 3) for reason, seconds in word["waits"].items()}}
            for word in self.of("worker")
        }

    def troubles(self) -> dict[str, dict[str, Any]]:
        """By rank: the first number of each worker that was not finite."""
        return {str(word["rank"]): word["trouble"] for word in self.of("worker") if word["trouble"]}

    def traffic(self) -> dict[str, int]:
        """Bytes by layer and protocol: "conv1 delta", "conv1 pull"."""
        total: Counter[str] = Counter()
        for word in self.of("worker"):
            total.update(word["traffic"])
        return dict(total)

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


def coarse(histogram: Counter[int]) -> dict[int, int]:
    """Exact up to 8, then by powers of two: so that a line stays short however far replicas drift apart."""
    total: Counter[int] = Counter()
    for value, count in histogram.items():
        total[value if value <= 8 else 1 << value.bit_length() - 1] += count
    return dict(sorted(total.items()))


def mean(histogram: Counter[int]) -> float:
    return sum(value * count for value, count in histogram.items()) / max(histogram.total(), 1)
