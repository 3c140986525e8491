"""Events of instances, wherever they are kept: journal, NATS, memory."""
