"""Which op, range and module each piece of GPU work belongs to, and what is missing."""
