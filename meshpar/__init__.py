"""meshpar: composable parallelism on PyTorch DeviceMesh."""
