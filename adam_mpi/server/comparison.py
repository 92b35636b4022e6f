"""The comparison of all copies of the shards that a server serves, by their checksums."""

from adam_mpi.cluster.control_messages import CopiesCompared
from adam_mpi.server.session import ServerSession


class Comparison:
    """A comparison of all copies of the shards that are served here, ordered in `session`."""

    def __init__(self, session: ServerSession) -> None:
        self.replicator = session.replicator
        self.copies = 0
        if self.replicator is not None:
            self.earlier = self.replicator.compared
            self.earlier_different = self.replicator.found_different
            self.copies = self.replicator.compare()

    def result(self) -> CopiesCompared | None:
        """Return how many copies were compared and were different; None while some are not compared."""
        if self.replicator is None:
            return CopiesCompared(copies=0, different=0)
        done = self.replicator.compared - self.earlier
        if done < self.copies:
            return None
        return CopiesCompared(copies=done, different=self.replicator.found_different - self.earlier_different)
