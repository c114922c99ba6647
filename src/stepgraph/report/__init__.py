"""What happened in a training run: a folder that `fit` writes while it trains, and a page that shows it.

`record` is the file and its locking; `recorder` is what `fit` calls; `run` reads a record back;
`page` turns it into one HTML file and `live` serves that page during training.
"""
