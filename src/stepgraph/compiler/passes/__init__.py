"""The passes of the pipeline, one in each module, and what several of them ask about a graph."""
