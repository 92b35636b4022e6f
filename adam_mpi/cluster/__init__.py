"""Who is where: the layout of roles, the world of one generation, and the ways bytes travel between ranks."""
