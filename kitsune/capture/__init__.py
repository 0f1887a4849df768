"""From one call of the user's step to one graph of ATen operators, and the conditions under which it holds."""
