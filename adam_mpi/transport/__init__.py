"""Messages between roles: mailboxes and rings, published weights, batches, and the generation they belong to."""
