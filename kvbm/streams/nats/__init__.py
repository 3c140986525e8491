"""Events, heartbeats and broadcasts on NATS."""
