"""Which instance should serve a prompt: costs, what was routed, and what a fetch from a peer costs."""
