"""Where questions come in: HTTP and NATS, connections, TLS, and what is answered at once."""
