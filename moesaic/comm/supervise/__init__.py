"""The parts of the supervisor. No torch here: its process starts fast and stays small."""
