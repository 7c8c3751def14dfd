"""Times that were not measured, from those that were."""
