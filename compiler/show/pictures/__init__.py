"""Single pictures of a plan: drawn once as shapes, written as SVG, PNG, Markdown or text for a terminal."""
