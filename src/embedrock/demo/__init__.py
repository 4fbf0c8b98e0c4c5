"""``embedrock demo``: train a recommender on planted clicks, or on a log of the user's own.

`click_run` and `log_run` tell the two stories from top to bottom; the other files are their nouns.
"""
