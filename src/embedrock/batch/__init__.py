"""What one batch is: its ids, its plan, its gradients, its bags."""
