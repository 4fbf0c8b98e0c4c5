"""``bench step | lookup | plan | rows | create``: tables in RAM, beside PyTorch and FBGEMM."""
