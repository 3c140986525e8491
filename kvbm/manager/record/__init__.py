"""How what a manager decides is recorded, and how it reaches the journal and the publisher."""
