"""What two runs leave behind, saved, put back and compared."""
