"""``bench dlrm``: many tables that one batch uses together, beside PyTorch, FBGEMM and TorchRec."""
