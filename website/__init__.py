"""The documentation as a site, its pages that are generated from the code, and numbers and pictures of others."""
