"""``bench dlrm | groups``: many tables that one batch uses together, beside PyTorch, FBGEMM and TorchRec."""
