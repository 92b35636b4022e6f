"""What outlives a job: the servers' stores, snapshots, files of weights, and the state that a run resumes from."""
