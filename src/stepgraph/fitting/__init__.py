"""Training loops: `fit`, the data it reads, and what it measures, schedules, remembers and shows."""
