"""The trainable factors."""
