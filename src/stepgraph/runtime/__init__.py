"""What persists between calls: executables, training state, and the handle that an execute call returns."""
