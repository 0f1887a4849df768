"""Running the user's loop: captured where that is possible and faster, eagerly where not."""
