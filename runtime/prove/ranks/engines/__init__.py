"""One module for each engine, each an adapter: FEATURES, PACKAGES, supports, build, step and full_parameters."""
