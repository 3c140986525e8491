"""OBJECT: blocks in a store of objects that instances share."""
