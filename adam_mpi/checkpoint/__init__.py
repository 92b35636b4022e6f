"""What outlives a job: the servers' stores, snapshots, and the choice of what to go on from."""
