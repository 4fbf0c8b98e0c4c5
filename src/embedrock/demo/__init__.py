"""``embedrock demo``: train a recommender on planted clicks, on a log of the user's own, or a DLRM on either.

`clicks`, `log` and `dlrm` tell the stories from top to bottom; `training` is the one loop of all, and `course` what is
printed of it where batches come from a `Source`. `data` is what is trained on; `torch` and `keras` are what each
framework brings, a `Learner`.
"""
