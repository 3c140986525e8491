"""The journal: an instance's own files of its events."""
