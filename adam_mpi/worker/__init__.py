"""The worker rank: trainer threads on shared local weights, and the clients that push to and pull from the servers."""
