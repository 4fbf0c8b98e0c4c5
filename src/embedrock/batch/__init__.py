"""One batch: its ids, its plan, its gradients, its bags."""
