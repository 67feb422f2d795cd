"""Data parallelism: shards, replicas and what they keep whole."""
