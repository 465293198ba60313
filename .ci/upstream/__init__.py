"""Other projects' own code, made to run without a GPU: their parsers and checks judge what is read and written."""
