"""The demo with Keras on TensorFlow: models and the learner."""
