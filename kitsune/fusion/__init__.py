"""Replaces parts of a captured graph by operators that do the same in fewer launches and with less traffic."""
