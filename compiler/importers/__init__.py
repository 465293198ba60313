"""Other tools' configurations: what a file is, how it is read, and the spec that it becomes."""
