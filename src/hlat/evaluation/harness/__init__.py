"""Tasks of lm-eval (the extra ``eval``) on models of hlat: suites, results, tables."""
