"""What will be done; pure data."""
