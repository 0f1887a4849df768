"""What runs a captured graph."""
