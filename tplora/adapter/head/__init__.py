"""The head and the loss behind it: this rank's part of the vocabulary, a few tokens at a time."""
