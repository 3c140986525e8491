"""Where is a block? How a manager or a router asks the catalog."""
