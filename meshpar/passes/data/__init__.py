"""Data parallelism: where gradients are reduced (``shard_and_reduce.py``), shards, replicas and what stays whole."""
