"""Tools of development, which the package does not need."""
