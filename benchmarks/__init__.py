"""The same training step in stepgraph and in other libraries, side by side in one run. See README.md."""
