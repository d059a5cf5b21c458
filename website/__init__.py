"""The documentation as a site: pages generated from the code, and the hook of mkdocs.yml."""
