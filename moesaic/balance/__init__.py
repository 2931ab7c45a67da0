"""Expert load balancing: placements computed from loads."""
