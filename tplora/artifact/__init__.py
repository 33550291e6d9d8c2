"""What is left afterwards."""
