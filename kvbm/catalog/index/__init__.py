"""Who holds which block: the index, what is looked up in it, and what changes in it."""
