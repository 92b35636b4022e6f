"""Everything about ranks as processes: their roles, communicators, windows, control messages, and their loss."""
