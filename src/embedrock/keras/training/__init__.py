"""A step of training: lookups and their gradients, handles of tables, and optimizers that step rows."""
