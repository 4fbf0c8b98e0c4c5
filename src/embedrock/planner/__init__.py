"""What tables will cost on a machine, and how to choose before anything is trained."""
