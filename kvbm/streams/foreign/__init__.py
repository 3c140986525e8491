"""Other engines' events → ours."""
