"""``embedrock demo``: train a recommender on planted clicks, or on a log of the user's own.

`clicks` and `log` tell the two stories from top to bottom; `training` is the one loop of both. `data` is what is
trained on; `torch` and `keras` are what each framework brings, a `Learner`.
"""
