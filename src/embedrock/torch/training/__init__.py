"""Training of rows: lookups, executors, the handle, and pending gradients."""
