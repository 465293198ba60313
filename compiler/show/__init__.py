"""What a person looks at: pictures, the page, Markdown."""
