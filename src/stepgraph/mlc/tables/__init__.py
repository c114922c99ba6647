"""The tables, a family a file."""
