"""Facts that are checked at every step, in C where there is a compiler."""
