"""NVME: files and block devices that outlive the process, and those of a pod's other instances."""
