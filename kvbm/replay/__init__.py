"""The same fold offline: what a stream, a journal or a capture holds, and whether it is true."""
