"""What runs in the engine's own interpreter: tiny models, one plain process, an engine on forked gloo ranks.

It imports the standard library, torch, transformers and the engine, and nothing else of this project: any interpreter
that has these can run it (`bootstrap`).
"""
