"""``bench gpu``: rows in host memory trained at the GPU's speed."""
