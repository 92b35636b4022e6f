"""The worker role: replicas that compute, and the clients that connect them to data ranks and servers."""
