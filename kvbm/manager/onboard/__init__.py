"""How blocks come to the tier that requests use: from colder tiers and from other instances."""
