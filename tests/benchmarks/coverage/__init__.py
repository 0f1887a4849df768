"""Which models of other people's libraries are captured: each trains a few steps with and without Kitsune."""
