"""RDMA's own layer: devices, registered memory, queue pairs and their completions.

It needs pyverbs, which is loaded when asked for.
"""
