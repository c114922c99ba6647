"""What the programs of several ranks need besides those of one: how work is divided, and what is exchanged."""
