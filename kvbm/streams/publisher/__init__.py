"""Events → JetStream: a state machine without I/O, and the thread that carries out what it decides."""
