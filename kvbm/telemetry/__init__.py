"""Names of logs and metrics, once."""
