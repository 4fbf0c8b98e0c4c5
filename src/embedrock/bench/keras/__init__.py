"""``bench keras | tf-data``: training with Keras, and reading ids for it."""
