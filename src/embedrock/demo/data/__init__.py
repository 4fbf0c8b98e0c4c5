"""What is trained on: planted clicks and impressions, logs of interactions, and Criteo's."""
