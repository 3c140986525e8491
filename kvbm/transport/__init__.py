"""Bytes between instances: one lends blocks of HOST or NVME, another reads them."""
