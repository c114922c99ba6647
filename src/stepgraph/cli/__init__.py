"""The command `stepgraph`: `main.py` holds the table of subcommands, each is a module here."""
