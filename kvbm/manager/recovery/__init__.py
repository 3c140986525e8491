"""What NVME still holds after a restart: from the journal, or from the headers of slots."""
