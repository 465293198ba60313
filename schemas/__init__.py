"""JSON Schemas (draft 2020-12) of the spec and of every emitted file."""
