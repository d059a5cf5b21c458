"""Reports of a plan: tables, sentences, an HTML page and a Chrome trace."""
