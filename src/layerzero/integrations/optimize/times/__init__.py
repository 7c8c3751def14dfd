"""Times of variants beside each other: of modules, of the calls that inputs make, and what a report says."""
