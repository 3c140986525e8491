"""Objects of several blocks, and what this instance claims of the object pool."""
