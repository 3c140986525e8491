"""What outlives the catalog: its tables, and how they are read and written."""
