"""What is trained on: clicks drawn from planted factors, and logs of interactions."""
