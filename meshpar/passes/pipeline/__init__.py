"""Pipeline parallelism: each rank computes some of the layers."""
