"""The server role: applies pushes to shards, replicates them, and publishes the weights."""
