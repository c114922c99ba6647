"""What holds buffers between calls: executables, the state of training, and the handle an execute call returns."""
