"""Models and loops of other people's libraries, in the releases that are installed."""
