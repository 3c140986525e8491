"""The past of a catalog's archive: one process keeps a history of it going, others answer questions of it."""
