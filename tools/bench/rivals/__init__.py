"""Stores that hold the same table in different ways, and what it takes to compare them fairly."""
