"""What happened in a training run: a folder that `fit` writes while it trains, and a page that shows it.

`record` is the file and who may append to it; `recorder` is what `fit` calls; `run` reads a record back;
`page` makes one HTML file of it and `live` serves that page while training goes on.
"""
