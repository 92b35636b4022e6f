"""The parameter server: shards and where they lie, mailboxes, the apply kernels, and the serving rank."""
