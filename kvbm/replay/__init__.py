"""The same fold offline: what a stream, a journal or a capture says, and whether it is true."""
