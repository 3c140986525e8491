"""Who may ask, and how much: callers, their tokens and certificates, and the limits of each."""
