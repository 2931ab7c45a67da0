"""How well a model answers: problems to an engine or a server, replies graded, figures written."""
