"""What runs captured programs, and makes them faster while they run."""
