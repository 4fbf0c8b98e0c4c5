"""``bench shards``: one model trained by several processes of torch.distributed."""
