"""Several workers of a cluster: repairs of `fit`, messages between workers, and shards."""
