"""Processes: started, watched, and named when one of them fails."""
