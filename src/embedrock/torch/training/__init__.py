"""What happens between a layer and a step: where rows are used, lookups, the handle, gradients that wait."""
