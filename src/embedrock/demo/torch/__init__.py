"""The demo with PyTorch: models, what keeps their rows, the learner, and the contest between backends."""
