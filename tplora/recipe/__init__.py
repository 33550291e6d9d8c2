"""What the user asked for; no torch."""
